"""The specialisations that are proved against the host code: its launches, recorded, for every variant."""

from __future__ import annotations

import pytest
import torch

from proof.metal import kernels as strict_kernels
from tests.proof.needs import needs_clang, needs_simulated_device
from torch_gdn import _C
from torch_gdn.specialisations import KERNELS, Specialisation, Variant
from torch_gdn.tune import prefill_algorithm

pytestmark = [needs_clang, needs_simulated_device, pytest.mark.xdist_group("strict")]


@pytest.fixture(scope="module")
def launches() -> list:
    from proof.metal import launches as strict_launches

    return strict_launches.launches_of(strict_kernels.all_variants(), strict_kernels.LONGEST_ROWS, others=True)


def test_the_host_launches_what_is_proved_and_nothing_else(launches: list) -> None:
    assert {launch.specialisation for launch in launches} == set(strict_kernels.all_specialisations())


def test_names_and_files_are_the_hosts(launches: list) -> None:
    for launch in launches:
        assert (launch.name, launch.file) == (launch.specialisation.name, launch.specialisation.file)


def test_the_host_binds_what_the_kernel_takes(launches: list) -> None:
    rows = (row.split("\t") for row in strict_kernels.TABLE.read_text().splitlines()[1:])
    assert {launch.name: launch.bindings for launch in launches} == {row[0]: int(row[2]) for row in rows}


def test_threadgroups_are_whole_simdgroups(launches: list) -> None:
    assert all(launch.threads % 32 == 0 and 32 <= launch.threads <= 1024 for launch in launches)


def test_the_source_is_what_the_host_compiles() -> None:
    from proof.metal import launches as strict_launches

    wanted = Specialisation("l2norm", ("bfloat", "40"))
    assert strict_launches.source_of(Variant(torch.bfloat16, 40, 24)) == strict_kernels.source_of([wanted])


def test_threadgroup_bytes_are_what_the_simulated_device_counts() -> None:
    """One token, so that little is run."""
    import simulator
    from torch_gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, l2norm

    ops = torch.ops.gdn
    simulator.activate()
    x, g = torch.ones(1, 1, 1, 64, device="mps"), torch.zeros(1, 1, 1, device="mps")
    signs, boundaries, codebook = (torch.ones(size, device="mps") for size in (64, 15, 16))
    with simulator.profile() as profile:
        for algorithm in _C.prefill_algorithms():
            with prefill_algorithm(algorithm):
                chunk_gated_delta_rule(x, x, x, g, beta=g)
        sums = ops.chunk_local_cumsum(g)
        inverse = ops.solve_tril(ops.chunk_scaled_dot_kkt(x, sums, g))
        ops.recompute_w_u(x, x, g, inverse, sums)
        fused_recurrent_gated_delta_rule(x, x, x, g, beta=g)
        l2norm(x)
        codes, norms, _ = ops.aura_encode(x, signs, boundaries, codebook)
        ops.aura_attention(x, *[codes, norms, codebook, signs] * 2)
    kernel_of = {each.name: each.kernel for each in strict_kernels.all_specialisations()}
    assert {kernel_of[name] for name in profile.kernels} > set(KERNELS)
    rows = (row.split("\t") for row in strict_kernels.TABLE.read_text().splitlines()[1:])
    table = {row[0]: int(row[1]) for row in rows}
    counted = {name: figures.threadgroup_memory for name, figures in profile.kernels.items()}
    assert counted == {name: table[name] for name in counted}
    assert counted["aura_flash_p1_4_4_64_1"] > 0 and counted["solve_tril_64"] > 0
