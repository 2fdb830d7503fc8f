"""Tests that every op has an entry, and that what derives from the entries leaves out no kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
import torch

from tests.helpers.devices import ready
from tests.helpers.shaders import shaders_of_ops
from torch_gdn import _C
from torch_gdn._library import shader_directory
from torch_gdn._recorder import Launch, recording
from torch_gdn_check import golden, plan
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import complete
from torch_gdn_check.registry.models import METAL_TYPES, MODEL_SIZES
from torch_gdn_check.registry.registry import compiled, computed, first_of_each_variant, launches_at


def kernels() -> set[str]:
    shaders = ((shader_directory() / file).read_text() for file in shaders_of_ops())
    return {
        name for text in shaders for name in re.findall(r"^\[\[kernel(?:, .+)?\]\] void (\w+)\(", text, re.MULTILINE)
    }


def kernels_of(launches: Iterable[Launch]) -> set[str]:
    return {launch.variant.kernel for launch in launches}


by_one_process = pytest.mark.xdist_group("registry")  # which records the launches once, for a minute


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Returns the launches of everything that the check compiles."""
    ready("mps")
    memory = fake_mps()
    points = [*computed(quick=False), *compiled()]
    return first_of_each_variant(launch for each in points for launch in launches_at(*each, memory))


def test_every_op_has_an_entry() -> None:
    assert complete() == set(_C.ops())


def test_the_check_computes_every_kernel() -> None:
    """Even the quick check, which is a part of the whole one, computes every kernel."""
    ready("mps")
    steps = plan.steps(golden.FOLDER, quick=True)
    assert {kernel for step in steps for kernel in step.kernels} == kernels()


@by_one_process
@pytest.mark.sweep(1, seeds=8)
def test_every_shader_is_some_kernels_file(launches: list[Launch]) -> None:
    assert {launch.variant.file for launch in launches} == set(shaders_of_ops())


@by_one_process
@pytest.mark.sweep(1, seeds=8)
def test_every_model_dtype_and_layout_is_called(launches: list[Launch]) -> None:
    names = {launch.variant.name for launch in launches}
    for K, V in MODEL_SIZES:
        for T in METAL_TYPES.values():
            S = "float" if T == "half" else T
            assert f"chunk_fwd_h_{T}_{S}_{K}_{V}_64_4_float" in names
            assert f"chunk_fwd_intra_{T}_{S}_{K}_{V}_64_4" in names
            assert f"recompute_w_u_{T}_{K}_{V}_64_4" in names and f"chunk_fwd_o_{T}_{T}_{K}_{V}_64_4" in names
            for layout in ("true", "false"):
                for norm in ("true", "false"):
                    assert f"fused_recurrent_gated_delta_rule_{T}_{K}_{layout}_{norm}_false_float" in names
    assert len(names) == len(launches) > 900


def test_variants_do_not_depend_on_memory() -> None:
    ready("mps")
    for entry, point in computed(quick=True):
        assert launches_at(entry, point, fake_mps()) == launches_at(entry, point)


def test_a_tensor_without_memory_is_recorded_at_any_size() -> None:
    ready("mps")
    before = {facts["name"] for facts in _C.pipelines()}
    with fake_mps(), recording() as recorded:
        torch.ops.gdn.l2norm(torch.empty(1, 2**20, 64, 56, device="mps"))
    (large,) = recorded.launches
    assert large.variant.name == "l2norm_float_56" and large.threadgroups == (2**24, 1, 1)
    assert {facts["name"] for facts in _C.pipelines()} == before


@pytest.mark.sweep(1, seeds=3)
def test_every_kernel_is_replayed_on_the_second_machine() -> None:
    from evidence.lab.cuda.cases import replayed  # only there is its device

    ready("mps")
    launches = [launch for each in replayed() for launch in launches_at(*each, fake_mps())]
    assert kernels_of(launches) == kernels()
    with_channels = {each.variant.kernel for each in launches if each.variant.arguments[-1:] == ("true",)}
    assert {"chunk_fwd_h", "chunk_fwd_o"} <= with_channels


def test_every_kernel_is_compiled_strictly_and_for_apples_gpus() -> None:
    """The compiler for Apple's GPUs gets these and more: see evidence/lab/agx/checks.py."""
    from evidence.proof.metal.launches import model_launches

    assert kernels_of(model_launches()) == kernels()


def test_what_overlaps_in_any_launch_of_a_variant_is_kept() -> None:
    """Bindings of one storage overlap if they share bytes, but not if one lies in the gaps of another."""
    ready("mps")
    decode = torch.ops.gdn.fused_recurrent_gated_delta_rule
    with fake_mps(), recording() as recorded:
        q, k, v = torch.empty(1, 2, 3, 64, device="mps").unsqueeze(2).unbind(3)
        g, beta = torch.empty(1, 2, 1, device="mps"), torch.empty(1, 2, 1, device="mps")
        decode(q, k, v, g, beta)
        decode(q, q, v, g, g)
    apart, both = recorded.launches
    assert apart.overlaps == () and both.overlaps == ((0, 1), (3, 4))
    assert [launch.overlaps for launch in first_of_each_variant(recorded.launches)] == [both.overlaps]
