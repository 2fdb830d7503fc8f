"""Tests the engine's runtime: order, seeds, workers, the perturbing mode, figures."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import mps_simulator
from metal_programs import Argument, run
from mps_simulator import settings

# The kernel writes the order in which the threads of a threadgroup arrive, before and after a barrier.
ORDER = """
kernel void order(device atomic_uint* counters [[buffer(0)]], device uint* first [[buffer(1)]],
                  device uint* second [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  first[atomic_fetch_add_explicit(counters, 1u, memory_order_relaxed)] = i;
  threadgroup_barrier(mem_flags::mem_none);
  second[atomic_fetch_add_explicit(counters + 1, 1u, memory_order_relaxed)] = i;
}
"""


def order(seed: int, threads: int = 128) -> tuple[list[int], list[int]]:
    counters = torch.zeros(2, dtype=torch.int32).to("mps")
    first, second = (torch.empty(threads, dtype=torch.int32, device="mps") for _ in range(2))
    with settings(seed=seed):
        run(ORDER, [counters, first, second], threads=threads)
    return first.tolist(), second.tolist()


def test_seed_0_runs_in_ascending_order() -> None:
    assert order(0) == (list(range(128)), list(range(128)))


def test_a_seed_shuffles_lanes_and_simdgroups_at_each_step() -> None:
    first, second = order(3)
    assert sorted(first) == sorted(second) == list(range(128))
    assert first != second
    for run_order in (first, second):
        simdgroups = list(dict.fromkeys(i // 32 for i in run_order))
        lanes = [i % 32 for i in run_order if i // 32 == simdgroups[0]]
        assert lanes != sorted(lanes)
    assert any(list(dict.fromkeys(i // 32 for i in order(seed)[0])) != [0, 1, 2, 3] for seed in range(1, 5))


def test_a_seed_is_reproducible_and_seeds_differ() -> None:
    assert order(11) == order(11)
    assert order(11) != order(12)


def test_an_order_dependent_result_shows_under_a_seed() -> None:
    """The atomic hides from the watch that the last thread to write wins. Shuffling shows it."""
    source = """
    kernel void last(device atomic_uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      atomic_store_explicit(out, i, memory_order_relaxed);
    }
    """

    def last(seed: int) -> int:
        out = torch.zeros(1, dtype=torch.int32).to("mps")
        with settings(seed=seed):
            run(source, [out], threads=64)
        return int(out.item())

    assert last(0) == 63
    assert len({last(seed) for seed in range(1, 9)}) > 1


SUMS = """
kernel void sums(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = simd_sum(source[i]) + exp(-source[i]);
}
"""


def sums(**values: object) -> torch.Tensor:
    torch.manual_seed(0)
    out = torch.empty(4096, device="mps")
    with settings(**values):
        run(SUMS, [torch.rand(4096).to("mps"), out], threadgroups=64, threads=64)
    return out.cpu()


@pytest.mark.parametrize("values", [{}, {"seed": 9}, {"seed": 9, "perturb": True}, {"watch": False}])
def test_one_and_two_workers_give_the_same_bits(values: dict[str, object]) -> None:
    assert torch.equal(sums(workers=1, **values), sums(workers=2, **values))


def test_the_watch_does_not_change_results() -> None:
    assert torch.equal(sums(watch=True), sums(watch=False))


@pytest.mark.parametrize("function", ["simd_sum", "simd_prefix_inclusive_sum"])
def test_a_reduction_is_shuffled_by_the_perturbing_mode_alone(function: str) -> None:
    source = SUMS.replace(" + exp(-source[i])", "").replace("simd_sum", function)
    values = torch.rand(4096)

    def reduced(**options: object) -> torch.Tensor:
        out = torch.empty(4096, device="mps")
        with settings(**options):
            run(source, [values.to("mps"), out], threadgroups=64, threads=64)
        return out.cpu()

    plain, shuffled = reduced(), reduced(perturb=True)
    assert torch.equal(plain, reduced(seed=4)), "the order of running must not reach a reduction"
    assert not torch.equal(plain, shuffled)
    assert not torch.equal(shuffled, reduced(perturb=True, seed=4))
    assert torch.equal(shuffled, reduced(perturb=True))
    rows = values.double().view(-1, 32)
    exact = (rows.sum(1, keepdim=True).expand_as(rows) if function == "simd_sum" else rows.cumsum(1)).reshape(-1)
    roundings = 5 if function == "simd_sum" else 31  # a tree's, and a chain's
    for result in (plain, shuffled):
        assert (result.double() - exact).abs().max() <= roundings * 2**-24 * rows.sum(1).max()
        lanes = result.view_as(rows)
        assert function != "simd_sum" or torch.equal(lanes, lanes[:, :1].expand_as(lanes))


EXP = """
kernel void exponentials(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
  out[i] = precise::exp(source[i]);
}
"""


def exponentials(source: torch.Tensor, **options: object) -> torch.Tensor:
    out = torch.empty(len(source), device="mps")
    with settings(**options):
        run(EXP, [source.to("mps"), out], grid=len(source), threads=64)
    return out.cpu()


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


def test_perturbed_exponentials_stay_within_the_specification() -> None:
    """The Metal specification allows precise::exp 4 ULPs. Without perturbation, ours is within one ULP."""
    source = torch.linspace(-80, 80, 4096)
    exact = source.double().exp().float()
    plain, perturbed = exponentials(source), exponentials(source, perturb=True, seed=1)
    assert ulps(plain, exact).max() <= 1
    distance = ulps(perturbed, plain)
    assert 2 <= distance.max() <= 4
    assert (distance > 0).float().mean() > 0.5
    direction = (perturbed - plain).sign()
    assert (direction > 0).any() and (direction < 0).any()
    assert torch.equal(perturbed, exponentials(source, perturb=True, seed=1))
    assert not torch.equal(perturbed, exponentials(source, perturb=True, seed=2))


def test_the_perturbing_mode_flushes_denormals() -> None:
    source = torch.tensor([-100.0, -90.0, -80.0])
    plain, perturbed = exponentials(source), exponentials(source, perturb=True)
    assert (plain > 0).all()
    assert perturbed.tolist()[:2] == [0, 0] and perturbed[2] > 0
    halve = "kernel void halve(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 0.5f; }"
    for perturb, expected in ((False, 2.0**-127), (True, 0.0), (False, 2.0**-127)):
        smallest = torch.full((1,), 2.0**-126).to("mps")
        with settings(perturb=perturb):
            run(halve, [smallest], threads=1)
        assert smallest.item() == expected


COUNTED = """
kernel void counted(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                    constant uint& shift [[buffer(2)]], threadgroup float4* extra [[threadgroup(0)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[t] = source[i] + source[i ^ 1];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float value = tile[t ^ 1];
  extra[t] = float4(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = simd_sum(value) + simd_max(value) + extra[t ^ shift].x;
}
"""


def test_figures_of_a_kernel_counted_by_hand() -> None:
    with mps_simulator.profile() as profile:
        for _ in range(2):
            arguments: list[Argument] = [torch.ones(192).to("mps"), torch.empty(192, device="mps"), 1]
            run(COUNTED, arguments, threadgroups=3, threads=64, threadgroup_memory={0: 1024})
    figures = profile.kernels["counted"]
    assert profile.launched("counted") == figures.dispatches == 2
    assert figures.threadgroups == 6
    assert figures.threads == 384
    assert figures.device_bytes_read == 384 * 8
    assert figures.device_bytes_written == 384 * 4
    assert figures.threadgroup_bytes_read in (384 * (4 + 4), 384 * (4 + 16))  # one scalar of the vector, or all
    assert figures.threadgroup_bytes_written == 384 * (4 + 16)
    assert figures.barriers == 2 * 6
    assert figures.collectives == 2 * 12
    assert figures.matrix_multiplies == 0
    assert figures.threadgroup_memory == 256 + 1024


def test_the_engine_goes_on_after_a_fault() -> None:
    """Faulty kernels leave hundreds of threads waiting, repeatedly. The next dispatch must be right."""
    source = """
    kernel void stage(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                      constant uint& broken [[buffer(2)]], uint i [[thread_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
      threadgroup float tile[512];
      tile[t] = source[i];
      if (i == broken) return;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = tile[t ^ 1];
    }
    """
    values = torch.arange(2048, dtype=torch.float32)
    for broken in (5, 511, 700, 2047):
        with pytest.raises(mps_simulator.Fault, match="divergent threadgroup_barrier"):
            run(source, [values.to("mps"), torch.empty(2048, device="mps"), broken], threadgroups=4, threads=512)
        out = torch.empty(2048, device="mps")
        run(source, [values.to("mps"), out, 4096], threadgroups=4, threads=512)
        assert torch.equal(out.cpu(), values.view(-1, 2).flip(1).reshape(-1))


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 96, 1024])
def test_simdgroups_of_every_size(threads: int) -> None:
    source = """
    kernel void lanes(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      out[i] = simd_sum(1.0f);
    }
    """
    out = torch.empty(threads, device="mps")
    run(source, [out], threads=threads)
    expected = [min(32, threads - i // 32 * 32) for i in range(threads)]
    assert out.tolist() == expected


def test_exact_grids_have_smaller_threadgroups_at_their_edges() -> None:
    source = """
    kernel void sizes(device uint* out [[buffer(0)]], uint2 position [[thread_position_in_grid]],
                      uint2 group [[threads_per_threadgroup]], uint2 grid [[threads_per_grid]],
                      uint2 groups [[threadgroups_per_grid]]) {
      out[position.y * grid.x + position.x] = group.x + 10 * group.y + 100 * groups.x + 1000 * groups.y;
    }
    """
    out = torch.empty(3, 7, dtype=torch.int32, device="mps")
    run(source, [out], grid=(7, 3), threads=(4, 2))
    columns, rows = torch.tensor([4] * 4 + [3] * 3), torch.tensor([2, 2, 1])
    assert torch.equal(out.cpu().long(), 2200 + columns + 10 * rows[:, None])


def test_a_forked_child_runs_kernels_too() -> None:
    """A child has none of its parent's worker threads, and must not wait for them."""
    assert torch.equal(sums(workers=2), sums(workers=1))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(sums(workers=2), sums(workers=1)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_grid_wider_than_65535() -> None:
    source = """
    kernel void wide(device uchar* out [[buffer(0)]], uint2 group [[threadgroup_position_in_grid]]) {
      out[group.y * 70000 + group.x] = group.x % 251;
    }
    """
    out = torch.empty(2 * 70000, dtype=torch.uint8, device="mps")
    run(source, [out], threadgroups=(70000, 2), threads=1)
    assert torch.equal(out.cpu().long(), torch.arange(70000).remainder(251).repeat(2))
