"""The calls whose kernel variants are compiled by the check and proved: how broad they are."""

from __future__ import annotations

import re

import pytest

from tests.helpers.devices import ready
from torch_gdn import _C
from torch_gdn._library import shader_directory
from torch_gdn._recorder import Launch
from torch_gdn.check import calls
from torch_gdn.check.fake_mps import fake_mps


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    ready("mps")
    with fake_mps():
        return calls.launches(calls.table())


def test_every_kernel_is_launched(launches: list[Launch]) -> None:
    shaders = (path.read_text() for path in shader_directory().rglob("*.metal"))
    kernels = {name for text in shaders for name in re.findall(r"^\[\[kernel\]\] void (\w+)\(", text, re.MULTILINE)}
    assert {launch.variant.kernel for launch in launches} == kernels
    assert len(kernels) == 33


def test_every_shader_is_some_kernels_file(launches: list[Launch]) -> None:
    folder = shader_directory()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.metal")}
    assert {launch.variant.file for launch in launches} == files


def test_every_model_dtype_and_layout_is_called(launches: list[Launch]) -> None:
    names = {launch.variant.name for launch in launches}
    for _, _, K, V in calls.MODELS.values():
        for T in calls.METAL_TYPES.values():
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
    with fake_mps():
        without = calls.launches(calls.table(quick=True))
    assert without == calls.launches(calls.table(quick=True))


def test_quick_is_a_part_of_the_whole(launches: list[Launch]) -> None:
    with fake_mps():
        quick = calls.launches(calls.table(quick=True))
    assert {launch.variant for launch in quick} < {launch.variant for launch in launches}


def test_a_tensor_without_memory_is_recorded_at_any_size() -> None:
    ready("mps")
    before = {facts["name"] for facts in _C.pipelines()}
    with fake_mps():
        (launch,) = calls.launches([lambda: calls.longest_norm(calls.DTYPES[0])])
        (large,) = calls.launches([lambda: calls.torch_gdn.l2norm(calls.empty(1, 2**20, 64, 56))])
    assert launch.variant.name == "l2norm_bfloat_1024" and launch.threadgroups == (1, 1, 1)
    assert large.variant.name == "l2norm_float_56" and large.threadgroups == (2**24, 1, 1)
    assert {facts["name"] for facts in _C.pipelines()} == before


def test_what_overlaps_in_any_call_of_a_variant_is_kept() -> None:
    """Bindings of one storage overlap where they share bytes, not where one lies within another's gaps."""
    ready("mps")
    with fake_mps():
        q, k, v = calls.empty(1, 2, 3, 64).unsqueeze(2).unbind(3)
        g, beta = calls.empty(1, 2, 1), calls.empty(1, 2, 1)
        decode = calls.torch_gdn.fused_recurrent_gated_delta_rule
        (apart,) = calls.launches([lambda: decode(q, k, v, g, beta=beta)])
        (both,) = calls.launches([lambda: decode(q, k, v, g, beta=beta), lambda: decode(q, q, v, g, beta=g)])
    assert apart.overlaps == () and both.overlaps == ((0, 1), (3, 4))
