"""Tests profile(detailed=True): the accesses of simdgroups in small kernels counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mps_simulator
from metal_programs import Argument, figures, run
from mps_simulator import settings


def ramp(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype).to("mps")


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, device="mps")


def reads(kernel: Any) -> tuple[int, int, int, int]:
    """Returns issued and distinct bytes, cache lines and the least number of them, without the store of one float per
    lane.
    """
    stores = kernel.device_bytes_issued_written // 128
    assert kernel.device_bytes_issued_written == stores * 128
    return (
        kernel.device_bytes_issued_read,
        kernel.device_bytes_distinct_read,
        kernel.cache_lines - stores,
        kernel.least_cache_lines - stores,
    )


# ---- device memory -----------------------------------------------------------------------------------------------

ENDS = "float ends(float4 whole) { return whole.x + whole.w; }"
LOADS = (
    ENDS
    + """
kernel void loads(device const TYPE* source [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = VALUE;
}
"""
)


@pytest.mark.parametrize(
    ("element", "value", "expected"),
    [
        ("float", "source[i]", (128, 128, 1, 1)),
        ("float4", "ends(source[i])", (512, 512, 4, 4)),
        ("half", "float(source[i])", (64, 64, 1, 1)),
        ("bfloat4", "ends(float4(source[i]))", (256, 256, 2, 2)),
        ("float", "source[2 * i]", (128, 128, 2, 1)),
        ("float", "source[32 * i]", (128, 128, 32, 1)),
        ("float4", "ends(source[2 * i])", (512, 512, 8, 4)),
        ("float", "source[31 - i]", (128, 128, 1, 1)),
        ("float", "source[i + 8]", (128, 128, 2, 1)),
        ("float", "source[5]", (4, 4, 1, 1)),
        ("float", "source[i / 2]", (64, 64, 1, 1)),
        ("float", "source[i] + source[i + 1]", (256, 132, 3, 2)),
    ],
)
@pytest.mark.parametrize("seed", [0, 5])
def test_loads_of_one_simdgroup(element: str, value: str, expected: tuple[int, ...], seed: int) -> None:
    source = LOADS.replace("TYPE", element).replace("VALUE", value)
    with settings(seed=seed):
        kernel = figures(source, [ramp(1024), zeros(32)])
    assert reads(kernel) == expected


def test_vectors_that_overlap_count_their_bytes_once() -> None:
    source = LOADS.replace("TYPE", "float").replace("VALUE", "VALUE(source + i)")
    source = source.replace("VALUE(source + i)", "float2(*(device const packed_float2*)(source + i)).y")
    kernel = figures(source, [ramp(64), zeros(32)])
    # A packed vector is loaded element by element, in one or two accesses of 128 bytes, and not one for each lane.
    assert kernel.device_bytes_issued_read in (128, 256)
    assert kernel.device_bytes_distinct_read in (128, 132)


def test_a_loop_is_an_access_for_each_turn() -> None:
    source = """
    kernel void walk(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                     constant uint& turns [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      float sum = 0;
      for (uint n = 0; n < turns; ++n) sum += source[n * 32 + i];
      out[i] = sum;
    }
    """
    assert reads(figures(source, [ramp(320), zeros(32), 10])) == (1280, 1280, 10, 10)


def test_lanes_with_fewer_turns_leave_a_loop_early() -> None:
    """Lane i makes i % 4 + 1 turns, so the four accesses have 32, 24, 16 and 8 lanes."""
    source = """
    kernel void walk(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
      float sum = 0;
      for (uint n = 0; n <= i % 4; ++n) sum += source[n * 32 + i];
      out[i] = sum;
    }
    """
    kernel = figures(source, [ramp(128), zeros(32)])
    assert reads(kernel) == (4 * (32 + 24 + 16 + 8), 4 * (32 + 24 + 16 + 8), 4, 4)
    assert kernel.device_accesses == 4 + 1


@pytest.mark.parametrize("barrier", ["threadgroup_barrier", "simdgroup_barrier"])
def test_an_instruction_after_a_barrier_is_another_access(barrier: str) -> None:
    source = """
    kernel void walk(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                     constant uint& turns [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      float sum = 0;
      for (uint n = 0; n < turns; ++n) {
        if (i % 2 == n % 2) sum += source[i];
        BARRIER(mem_flags::mem_threadgroup);
      }
      out[i] = sum;
    }
    """
    kernel = figures(source.replace("BARRIER", barrier), [ramp(64), zeros(64), 4], threads=64)
    assert reads(kernel) == (2 * 4 * 64, 256, 2 * 4, 2 * 4)
    assert kernel.device_accesses == 2 * (4 + 1)


def test_an_instruction_after_a_rendezvous_is_another_access() -> None:
    """If a simd_sum lies between the turns that two lanes skip, their turns n are not one access."""
    source = """
    kernel void gather(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                       constant uint& turns [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      float sum = 0;
      for (uint n = 0; n < turns; ++n) {
        if (i % 2 == n % 2) sum += source[i];
        sum = simd_sum(sum);
      }
      out[i] = sum;
    }
    """
    kernel = figures(source, [ramp(32), zeros(32), 4])
    assert reads(kernel) == (4 * 64, 128, 4, 4)
    assert kernel.device_accesses == 4 + 1


@pytest.mark.parametrize("seed", [0, 5])
def test_simdgroups_and_the_rest_of_one(seed: int) -> None:
    """80 threads are two whole simdgroups and 16 lanes. All read the same 32 floats."""
    source = LOADS.replace("TYPE", "float").replace("VALUE", "source[i % 32]")
    with settings(seed=seed):
        kernel = figures(source, [ramp(32), zeros(80)], threads=80)
    assert kernel.device_accesses == 6
    assert (kernel.device_bytes_issued_read, kernel.device_bytes_distinct_read) == (128 + 128 + 64, 128)
    assert (kernel.device_bytes_issued_written, kernel.device_bytes_distinct_written) == (320, 320)
    assert (kernel.cache_lines, kernel.least_cache_lines) == (6, 6)


@pytest.mark.parametrize("workers", [1, 2])
def test_distinct_bytes_of_threadgroups_that_read_the_same(workers: int) -> None:
    source = """
    kernel void share(device const float* source [[buffer(0)]], device float* out [[buffer(1)]],
                      uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
      out[i] = source[t];
    }
    """
    with settings(workers=workers):
        kernel = figures(source, [ramp(64), zeros(5 * 64)], threadgroups=5, threads=64)
    assert (kernel.device_bytes_issued_read, kernel.device_bytes_distinct_read) == (5 * 256, 256)
    assert (kernel.device_bytes_issued_written, kernel.device_bytes_distinct_written) == (5 * 256, 5 * 256)


def test_dispatches_are_summed() -> None:
    source = LOADS.replace("TYPE", "float").replace("VALUE", "source[i]")
    arguments: list[Argument] = [ramp(32), zeros(32)]
    with mps_simulator.profile(detailed=True) as profile:
        run(source, arguments, threads=32)
        run(source, arguments, threads=32)
    kernel = profile.kernels["loads"]
    assert (kernel.dispatches, kernel.device_bytes_issued_read, kernel.device_bytes_distinct_read) == (2, 256, 256)


def test_two_arguments_in_one_buffer() -> None:
    source = """
    kernel void both(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                     device float* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      out[i] = a[i] + b[i];
    }
    """
    memory = ramp(128)
    assert reads(figures(source, [memory, (memory, 128), zeros(32)])) == (256, 256, 2, 2)
    assert reads(figures(source, [memory, (memory, 64), zeros(32)])) == (256, 192, 3, 2)


def test_stores_and_atomics() -> None:
    source = """
    kernel void last(device float* out [[buffer(0)]], device atomic_uint* last [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
      out[2 * i] = i;
      atomic_exchange_explicit(last, i, memory_order_relaxed);
    }
    """
    last = torch.zeros(1, dtype=torch.int32, device="mps")
    kernel = figures(source, [zeros(64), last])
    assert (kernel.device_bytes_issued_read, kernel.device_bytes_distinct_read) == (4, 4)
    assert (kernel.device_bytes_issued_written, kernel.device_bytes_distinct_written) == (128 + 4, 128 + 4)
    assert (kernel.device_accesses, kernel.cache_lines, kernel.least_cache_lines) == (2, 2 + 1, 1 + 1)


MATRIX = """
kernel void matrix(device const TYPE* source [[buffer(0)]], device TYPE* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  simdgroup_matrix<TYPE, 8, 8> a;
  simdgroup_load(a, source, PITCH, ulong2(0, 0), TRANSPOSED);
  simdgroup_store(a, out, 8);
}
"""


@pytest.mark.parametrize(("element", "dtype"), [("float", torch.float32), ("bfloat", torch.bfloat16)])
@pytest.mark.parametrize("transposed", ["false", "true"])
@pytest.mark.parametrize("pitch", [8, 128])
def test_a_matrix_is_one_access(element: str, dtype: torch.dtype, transposed: str, pitch: int) -> None:
    """Each lane has two elements, however it fetches them: 64 elements in 8 rows."""
    source = MATRIX.replace("TYPE", element).replace("PITCH", str(pitch)).replace("TRANSPOSED", transposed)
    kernel = figures(source, [ramp(1024, dtype), zeros(64).to(dtype)])
    size = 64 * dtype.itemsize
    least = size // 128
    assert kernel.device_accesses == 2
    assert (kernel.device_bytes_issued_read, kernel.device_bytes_issued_written) == (size, size)
    assert (kernel.cache_lines, kernel.least_cache_lines) == ((8 if pitch == 128 else least) + least, 2 * least)


# ---- threadgroup memory ------------------------------------------------------------------------------------------

BANKS = (
    ENDS
    + """
kernel void banks(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                  uint group [[threadgroup_position_in_grid]]) {
  threadgroup TYPE tile[1024];
  for (uint n = i; n < 1024; n += 32) tile[n] = TYPE(n);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = VALUE;
}
"""
)


@pytest.mark.parametrize(
    ("element", "value", "cycles", "least"),
    [
        ("float", "tile[i]", 1, 1),
        ("float", "tile[31 - i]", 1, 1),
        ("float", "tile[2 * i]", 2, 1),
        ("float", "tile[32 * i]", 32, 1),
        ("float", "tile[33 * i % 1024]", 1, 1),
        ("float", "tile[7]", 1, 1),
        ("float", "tile[i / 16 * 32]", 2, 1),
        ("half", "float(tile[i])", 1, 1),
        ("half", "float(tile[2 * i])", 1, 1),
        ("half", "float(tile[4 * i])", 2, 1),
        ("float4", "ends(tile[i])", 4, 4),
        ("float4", "ends(tile[i / 8])", 1, 1),
        ("float4", "ends(tile[2 * i])", 8, 4),
    ],
)
def test_banks(element: str, value: str, cycles: int, least: int) -> None:
    source = BANKS.replace("TYPE", element).replace("VALUE", value)
    if element == "float4":
        source = source.replace("1024", "512")
    kernel = figures(source, [zeros(32)])
    stores = kernel.threadgroup_accesses - 1
    assert stores == (16 if element == "float4" else 32)
    for_stores = stores * (4 if element == "float4" else 1)
    assert (kernel.bank_cycles - for_stores, kernel.least_bank_cycles - for_stores) == (cycles, least)


def test_banks_of_several_simdgroups_and_threadgroups() -> None:
    source = """
    kernel void banks(threadgroup float* tile [[threadgroup(0)]], device float* out [[buffer(0)]],
                      uint i [[thread_index_in_threadgroup]]) {
      tile[4 * i] = i;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = tile[4 * (63 - i)];
    }
    """
    kernel = figures(source, [zeros(64)], threadgroups=1, threads=64, threadgroup_memory={0: 1024})
    assert (kernel.threadgroup_accesses, kernel.bank_cycles, kernel.least_bank_cycles) == (4, 16, 4)


# ---- the profile -------------------------------------------------------------------------------------------------

DETAILS = ("device_accesses", "device_bytes_issued_read", "cache_lines", "threadgroup_accesses", "bank_cycles")


def test_nothing_is_counted_unless_asked_for() -> None:
    source = BANKS.replace("TYPE", "float").replace("VALUE", "tile[i]")
    kernel = figures(source, [zeros(32)], detailed=False)
    assert kernel.device_bytes_written == 128
    assert [getattr(kernel, name) for name in DETAILS] == [0] * len(DETAILS)
    assert kernel.device_bytes_distinct_written == 0
    assert not mps_simulator.settings.detailed


def test_a_profile_inside_a_detailed_one_is_detailed() -> None:
    source = LOADS.replace("TYPE", "float").replace("VALUE", "source[i]")
    with mps_simulator.profile(detailed=True) as outer:
        inner = figures(source, [ramp(32), zeros(32)], detailed=False)
        assert mps_simulator.settings.detailed
    assert inner.device_accesses == outer.kernels["loads"].device_accesses == 2
    assert "issued read" in str(outer) and not mps_simulator.settings.detailed


def test_a_detailed_profile_needs_the_watch() -> None:
    with settings(watch=False), pytest.raises(ValueError, match=r"expected settings\.watch to be on"):  # noqa: SIM117
        with mps_simulator.profile(detailed=True):
            pass


def test_counting_goes_on_after_a_fault() -> None:
    faulty = LOADS.replace("TYPE", "float").replace("VALUE", "source[i * 64]")
    with pytest.raises(mps_simulator.Fault):
        figures(faulty, [ramp(64), zeros(32)])
    kernel = figures(LOADS.replace("TYPE", "float").replace("VALUE", "source[i]"), [ramp(32), zeros(32)])
    assert reads(kernel) == (128, 128, 1, 1)


# ---- loads in flight ---------------------------------------------------------------------------------------------

ROUNDS_OF_LOADS = """
    kernel void loads(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint i [[thread_index_in_threadgroup]]) {
      threadgroup float tile[64];
      float sum = 0.0f;
      float all[4];
      for (int part = 0; part < 4; ++part) all[part] = BEFORE ? x[part * 64 + i] : 0.0f;
      for (int part = 0; part < 4; ++part) {
        tile[i] = BEFORE ? all[part] : x[part * 64 + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += simd_sum(tile[63 - i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      y[i] = sum;
    }
"""


@pytest.mark.parametrize(("before", "rounds"), [("true", 1), ("false", 4)])
def test_loads_between_barriers_are_a_round(before: str, rounds: int) -> None:
    """Two simdgroups take part in each round, whatever collective operations lie between the loads."""
    kernel = figures(ROUNDS_OF_LOADS.replace("BEFORE", before), [ramp(256), zeros(64)], threads=64)
    assert kernel.load_rounds == 2 * rounds
