"""The specialisations that are proved against the host code: its launches, recorded, for every variant."""

from __future__ import annotations

import pytest
import torch

from proof import strict_kernels
from tests.proof.needs import needs_clang, needs_simulated_device
from torch_gdn.specialisations import Specialisation, Variant

pytestmark = [needs_clang, needs_simulated_device, pytest.mark.xdist_group("strict")]


@pytest.fixture(scope="module")
def launches() -> list:
    from proof import strict_launches

    return strict_launches.launches_of(strict_kernels.all_variants(), strict_kernels.LONGEST_ROWS)


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
    from proof import strict_launches

    wanted = Specialisation("l2norm", ("bfloat", "40"))
    assert strict_launches.source_of(Variant(torch.bfloat16, 40, 24)) == strict_kernels.source_of([wanted])


def test_threadgroup_bytes_are_what_the_simulated_device_counts() -> None:
    import simulator
    from torch_gdn import solve_tril

    simulator.activate()
    with simulator.profile() as profile:
        solve_tril(torch.zeros(1, 20, 1, 32, device="mps"))
    (facts,) = strict_kernels.check_batch([Specialisation("solve_tril", ("32",))]).facts
    assert profile.kernels["solve_tril_32"].threadgroup_memory == facts.threadgroup_bytes > 0
