"""Tests that the proofs cover what the host launches: the recorded calls, their bindings, their sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from evidence.proof.checks import Silent
from evidence.proof.metal import kernels as strict_kernels
from evidence.proof.metal import launches as strict_launches
from evidence.tests.proof.needs import (
    needs_clang,
    needs_simulated_device,
)
from tests.sweeps import share_of
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant, Launch, recording
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import METAL_TYPES
from torch_gdn_check.registry.registry import compiled, computed

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]


# `make proof` computes the list anyway, which takes a minute.
needs_every_launch = pytest.mark.sweep(1, seeds=8)


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    return strict_launches.all_launches()


@needs_every_launch
def test_every_variant_is_there_once(launches: list[Launch]) -> None:
    names = [launch.variant.name for launch in launches]
    assert len(names) == len(set(names)) >= 2310


@needs_every_launch
def test_what_the_check_compiles_and_what_models_launch_is_proved(launches: list[Launch]) -> None:
    proved = {launch.variant for launch in launches}
    assert {launch.variant for launch in strict_launches.model_launches()} <= proved
    assert {*strict_launches.variants([*computed(quick=False), *compiled()])} <= proved


@needs_every_launch
def test_every_choice_of_the_host_is_covered(launches: list[Launch]) -> None:
    """The largest kernels are covered with each dtype, chunk size, vector width and flag, at each size."""
    sizes = [(T, K, V) for T in METAL_TYPES.values() for K, V in strict_launches.SIZES]
    proved = {launch.variant.arguments for launch in launches if launch.variant.kernel == "chunk_fwd_h"}
    for T, K, V in sizes:
        for C in strict_launches.CHUNK_SIZES:
            for S in {T, "float" if T == "half" else T}:
                for width in {"1", "4" if K % 4 == 0 else "1"}:
                    assert (T, S, str(K), str(V), str(C), width, "float") in proved
    proved = {launch.variant.arguments for launch in launches if launch.variant.kernel.startswith("fused_recurrent")}
    for T, K, _ in sizes:
        for value_is_inner in {"true", "false" if K % 4 == 0 else "true"}:
            for norm in ("true", "false"):
                assert (T, str(K), value_is_inner, norm, "false", "float") in proved


def test_a_launch_unlike_its_kernel_is_found() -> None:
    variant = KernelVariant("solve_tril", "gdn/solve_tril.metal", ("64",))
    (facts,) = strict_kernels.check_batch([variant]).facts
    right = Launch(variant, facts.buffers, (1, 1, 1), 128)
    assert strict_kernels.unlike_the_host([right], [facts]) == []
    few = strict_kernels.unlike_the_host([Launch(variant, facts.buffers - 1, (1, 1, 1), 128)], [facts])
    assert few == [f"solve_tril_64: the host binds {facts.buffers - 1} buffers, the kernel takes {facts.buffers}"]
    (uneven,) = strict_kernels.unlike_the_host([Launch(variant, facts.buffers, (1, 1, 1), 100)], [facts])
    assert "100 threads" in uneven


def test_a_launch_that_binds_written_memory_twice_is_found() -> None:
    variant = KernelVariant("l2norm", "layers/l2norm.metal", ("float", "64"))
    (facts,) = strict_kernels.check_batch([variant]).facts
    overlaps = ((0, 1), (0, 3))  # the written buffer also bound as a source, and as a block of constants
    (problem,) = strict_kernels.unlike_the_host([Launch(variant, facts.buffers, (1, 1, 1), 128, overlaps)], [facts])
    assert problem == "l2norm_float_64: the host binds memory that the kernel may write as buffers 0 and 1"


def test_the_source_is_what_the_host_compiles() -> None:
    for variant in (
        KernelVariant("l2norm", "layers/l2norm.metal", ("bfloat", "40")),
        KernelVariant("chunk_fwd_h", "gdn/chunk_fwd_h.metal", ("half", "float", "40", "24", "64", "4", "float")),
    ):
        source = _C.shader_source(variant.kernel, variant.file, list(variant.arguments))
        assert source == strict_kernels.source_of([variant])


def call_kernels(ops: Iterable[str]) -> None:
    """Runs each op on its smallest inputs, and a prefill with each algorithm."""
    for entry in map(REGISTRY.__getitem__, ops):
        algorithms = dict.fromkeys(point.algorithm for point in entry.quick) or [None]
        for algorithm in algorithms:
            entry.run(to_device(entry.smallest(), "mps"), replace(entry.small, algorithm=algorithm))


@needs_simulated_device
@pytest.mark.sweep(1)
def test_threadgroup_bytes_are_what_the_simulated_device_counts() -> None:
    import mps_simulator

    mps_simulator.activate()
    ops = {"solve_tril", "aura_flash_p1", *share_of(list(REGISTRY), 16)}
    with recording() as recorded:
        call_kernels(ops)
    with mps_simulator.profile() as profile:
        call_kernels(ops)
    facts = {each.name: each for each in strict_kernels.check_variants(recorded.variants, Silent()).facts}
    counted = {name: figures.threadgroup_memory for name, figures in profile.kernels.items() if name in facts}
    assert counted == {name: each.threadgroup_bytes for name, each in facts.items()}
    assert counted["solve_tril_16"] > 0
    assert all(size > 0 for name, size in counted.items() if name.startswith("aura_flash_p1"))
