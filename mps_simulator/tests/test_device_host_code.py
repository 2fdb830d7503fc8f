"""Tests Objective-C++ host code as a Mac has it (host_code.mm) with the wheel's headers, on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mps_simulator


@pytest.fixture(scope="module")
def probe() -> Any:
    mps_simulator.load(Path(__file__).with_name("host_code.mm"))
    return torch.ops.simulator_probe


def ramp() -> torch.Tensor:
    return torch.arange(6.0, device="mps")


def doubled() -> list[float]:
    return [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("op", ["twice", "twice_by_library", "catches"])
def test_right_ways_to_encode(probe: Any, op: str) -> None:
    with mps_simulator.profile() as profile:
        y = getattr(probe, op)(ramp())
    assert y.tolist() == doubled()
    assert profile.launched("twice") == 1


def test_encoding_does_not_run(probe: Any) -> None:
    x = ramp()
    torch.mps.synchronize()
    y = probe.twice(x)
    assert mps_simulator.metal.pending_commands() == 1
    assert y.tolist() == doubled()


def test_a_temporary_may_die_after_encoding(probe: Any) -> None:
    x = ramp()
    torch.mps.synchronize()
    y = probe.four_times(x)
    z = probe.twice(x)  # reuses the temporary's block
    assert y.tolist() == [4.0 * i for i in range(6)]
    assert z.tolist() == doubled()


def test_an_input_may_die_after_encoding(probe: Any) -> None:
    assert probe.twice(torch.full((6,), 3.0, device="mps")).tolist() == [6.0] * 6


def test_a_strided_view_is_bound_at_its_offset(probe: Any) -> None:
    assert probe.twice(ramp()[2:]).tolist() == doubled()[2:]


def test_the_streams_copy(probe: Any) -> None:
    y = probe.copy_by_stream(ramp()[2:])
    assert y.tolist() == [2, 3, 4, 5]


def test_completed_handlers_run_when_the_buffer_completes(probe: Any) -> None:
    before = probe.completions()
    probe.count_completion(ramp())
    assert probe.completions() == before
    torch.mps.synchronize()
    assert probe.completions() == before + 1


def test_an_exception_in_a_block_passes_through_and_leaves_the_stream_usable(probe: Any) -> None:
    with pytest.raises(ValueError, match="thrown inside the block"):
        probe.throws_in_block(ramp())
    assert probe.twice(ramp()).tolist() == doubled()


def test_an_exception_may_not_leave_a_bare_dispatch_sync(probe: Any) -> None:
    with pytest.raises(mps_simulator.Fault, match=r"use dispatch_sync_with_rethrow.*thrown inside the block"):
        probe.throws_in_bare_dispatch_sync(ramp())


def test_waiting_in_a_block_is_a_deadlock(probe: Any) -> None:
    with pytest.raises(mps_simulator.Fault, match="deadlock on a Mac"):
        probe.waits_inside_block(ramp())


def test_encoding_off_the_queue(probe: Any) -> None:
    with pytest.raises(mps_simulator.Fault, match="off the stream's queue"):
        probe.encodes_off_the_queue(ramp())


def test_an_own_encoder_works_once_and_fails_after_any_other_op(probe: Any) -> None:
    x = ramp()
    torch.mps.synchronize()
    assert probe.own_encoder(x).tolist() == doubled()
    probe.twice(x)
    with pytest.raises(mps_simulator.Fault, match="already encoding"):
        probe.own_encoder(x)
    assert probe.twice(x).tolist() == doubled()


def test_an_over_released_pipeline(probe: Any) -> None:
    with pytest.raises(mps_simulator.Fault, match="over-released"):
        probe.over_releases(ramp())


def test_four_threads_encode_on_one_stream(probe: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = ramp()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: probe.four_times(x).tolist(), range(40)))
    assert results == [[4.0 * i for i in range(6)]] * 40
