"""Tests the watch's faults of order: data races, and threads that diverge."""

from __future__ import annotations

import pytest
import torch

import mps_simulator
from metal_programs import run
from mps_simulator import settings
from twins import (
    BARRIER,
    IN_GROUP,
    PARAMETERS,
    RACE,
    RACE_IN_TILE,
    SEEDS,
    THREAD,
    TILE,
    N,
    Twin,
    both_tests,
    ramp,
    unwritten,
)

ORDER = [
    Twin(
        "threadgroup memory without a barrier",
        f"{TILE} tile[63 - i] = source[i]; @ out[63 - i] = tile[i];",
        ("", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
        [*RACE_IN_TILE, r"threadgroup_barrier( or simdgroup_barrier)? of mem_threadgroup"],
    ),
    Twin(
        "neighbouring bfloats without a barrier",
        """
        threadgroup bfloat tile[64];
        tile[i] = bfloat(0);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = bfloat(source[i]);
        out[i] = tile[i@];
        """,
        (" ^ 1", ""),
        RACE_IN_TILE,
    ),
    Twin(
        "only simdgroup_barrier between simdgroups",
        f"{TILE} tile[i] = source[i]; simdgroup_barrier(mem_flags::mem_threadgroup); out[i ^ @];",
        ("32] = tile[i ^ 32", "1] = tile[i ^ 1"),
        [*RACE_IN_TILE, r"threadgroup_barrier of mem_threadgroup"],
    ),
    Twin(
        "simdgroup_barrier of the wrong memory",
        f"{TILE} tile[i] = source[i]; simdgroup_barrier(mem_flags::@); out[i ^ 1] = tile[i ^ 1];",
        ("mem_device", "mem_threadgroup"),
        RACE_IN_TILE,
    ),
    Twin(
        "simd_sum orders no memory",
        f"{TILE} tile[i] = source[i]; float lanes = simd_sum(1.0f); @ out[i ^ 1] = tile[i ^ 1] + (lanes - 32);",
        ("", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        RACE_IN_TILE,
    ),
    Twin(
        "device memory behind a barrier of mem_threadgroup",
        """
        out[i] = -1;
        threadgroup_barrier(mem_flags::mem_device);
        out[i ^ 33] = source[i ^ 33];
        threadgroup_barrier(mem_flags::@);
        out[i] = out[i] + 0.0f;
        """,
        ("mem_threadgroup", "mem_device"),
        [r"data race at argument 'out' \(buffer 1\), element \d+", THREAD, RACE, r"of mem_device"],
    ),
    Twin(
        "barrier of mem_none",
        f"{TILE} tile[i ^ 33] = source[i ^ 33]; threadgroup_barrier(mem_flags::@); out[i] = tile[i];",
        ("mem_none", "mem_threadgroup"),
        RACE_IN_TILE,
    ),
    Twin(
        "tile used again without a second barrier",
        """
        threadgroup float tile[64];
        float sum = 0;
        for (uint pass = 0; pass < 2; ++pass) {
          tile[i] = source[i] * (pass == 0 ? 3 : -2);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += tile[63 - i];
          @
        }
        out[63 - i] = sum;
        """,
        ("", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
        RACE_IN_TILE,
    ),
    Twin(
        "two threadgroups write one element",
        "@ out[i] = source[i];",
        ("out[t] = source[t];", ""),
        [
            r"data race at argument 'out' \(buffer 1\), element \d+",
            RACE,
            r"thread \(\d+, 0, 0\) of threadgroup \([01], 0, 0\) writes what thread \(\d+, 0, 0\) of threadgroup",
            r"nothing orders the threadgroups",
        ],
        threadgroups=2,
        threads=32,
        parameters=f"{PARAMETERS}, {IN_GROUP}",
    ),
    Twin(
        "a threadgroup reads what another writes",
        "out[i] = source[i]; @",
        ("if (i == 32) out[i] = out[i] + 0 * out[31];", ""),
        [
            r"data race at argument 'out' \(buffer 1\), element 31 \(byte offset 124\)",
            RACE,
            r"nothing orders the threadgroups",
        ],
        threadgroups=2,
        threads=32,
    ),
    Twin(
        "two halves of one word, written by two threadgroups",
        "for (uint i = group; i < 128; i += 2) out[i] = source[i]; @",
        ("if (group == 1) out[64] = source[64];", ""),
        [r"data race at argument 'out' \(buffer 1\), element 64 \(byte offset 128\)", RACE],
        threadgroups=2,
        threads=1,
        parameters=f"{PARAMETERS}, {IN_GROUP}".replace("float", "ushort"),
    ),
    Twin(
        "atomic and plain additions of threadgroups",
        "@;",
        ("out[0] += 1", "atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed)"),
        [r"data race at argument 'out' \(buffer 1\), element 0", RACE],
        threadgroups=5,
        threads=1,
        arguments=lambda: [ramp(), torch.zeros(1, dtype=torch.int32).to("mps")],
        expected=lambda: torch.tensor([5], dtype=torch.int32),
        parameters=f"{PARAMETERS}, {IN_GROUP}".replace("float* out", "uint* out"),
    ),
    Twin(
        "two arguments are one memory",
        "float value = out[i]; @ out[i] = value;",
        ("if (i == 63) value = source[0];", ""),
        [r"data race at argument '(source|out)' \(buffer [01]\), element 0", RACE, r"thread \((0|63), 0, 0\)"],
        arguments=lambda: [shared := ramp(), shared],
    ),
]

DIVERGENCE = [
    Twin(
        "barrier in an if",
        f"@{BARRIER} out[i] = source[i];",
        ("if (i < 16) ", ""),
        [
            r"divergent threadgroup_barrier",
            r"16 threads at threadgroup_barrier\(mem_threadgroup\) \(thread \(0, 0, 0\)",
            r"48 threads returned \(thread \(16, 0, 0\)",
            r"threadgroup \(0, 0, 0\)",
        ],
    ),
    Twin(
        "two barriers in two branches",
        "@",
        (
            "if (i < 16) { out[i] = source[i]; threadgroup_barrier(mem_flags::mem_device); } "
            "else { threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = source[i]; }",
            "threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = source[i];",
        ),
        [
            r"divergent threadgroup_barrier",
            r"thread \(\d+, 0, 0\) is at threadgroup_barrier\(mem_(device|threadgroup)\)",
            r"while thread \(\d+, 0, 0\) of its threadgroup waits at threadgroup_barrier",
            THREAD,
        ],
    ),
    Twin(
        "early return before a barrier",
        f"@ threadgroup float tile[64]; tile[i] = source[i]; {BARRIER} out[i] = tile[i];",
        ("if (i >= 40) return;", ""),
        [
            r"divergent threadgroup_barrier",
            r"40 threads at threadgroup_barrier",
            r"24 threads returned \(thread \(40, 0, 0\)",
        ],
    ),
    Twin(
        "early return before a simd operation",
        "@ out[i] = simd_broadcast(source[i], 0) + i % 32;",
        ("if (i == 40) return;", ""),
        [r"divergent simd_broadcast", r"1 thread returned \(thread \(40, 0, 0\)\)"],
    ),
    Twin(
        "simd operation in an if",
        "float value = source[i]; @ out[i] = value;",
        ("if (i % 32 < 8) value = simd_max(value); threadgroup_barrier(mem_flags::mem_none);", ""),
        [r"divergent", r"8 threads at simd_max \(thread \(0, 0, 0\)", r"24 threads at threadgroup_barrier\(mem_none\)"],
    ),
    Twin(
        "different simd operations",
        "float value = source[i]; @ out[i] = value;",
        ("if (i % 2 == 0) value = simd_sum(value); else value = simd_max(value);", ""),
        [
            r"divergent simd_(sum|max)",
            r"is at simd_(sum|max) while thread \(\d+, 0, 0\) of its simdgroup waits at simd_",
            THREAD,
        ],
    ),
    Twin(
        "simdgroup_barrier in an if",
        "if (i < @) simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = source[i];",
        ("40", "32"),
        [r"divergent simdgroup_barrier", r"8 threads at simdgroup_barrier\(mem_threadgroup\) \(thread \(32, 0, 0\)"],
    ),
]

test_the_fault_is_reported, test_the_correct_twin_passes = both_tests([*ORDER, *DIVERGENCE])


def test_a_cell_does_not_remember_earlier_dispatches() -> None:
    """A race needs one dispatch. The same kernel runs again with its threadgroups on the other elements."""
    source = """
    kernel void spread(device float* out [[buffer(0)]], constant uint& turn [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
      out[(i + turn) % 64] = i;
    }
    """
    out = unwritten()
    for turn in range(0, N, 8):
        run(source, [out, turn], threadgroups=8, threads=8)
    assert torch.equal(out.cpu(), (torch.arange(N, dtype=torch.float32) - 56) % N)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("simd operation in an if", {i: i // 32 * 32 + 7 for i in range(N) if i % 32 < 8}),
        ("early return before a simd operation", {40: float("nan")} | {i: i // 32 * 32 + i % 32 for i in range(40)}),
        ("simdgroup_barrier in an if", {}),
    ],
)
def test_only_active_lanes_take_part_where_all_lanes_is_off(name: str, changed: dict[int, float], seed: int) -> None:
    twin = next(twin for twin in DIVERGENCE if twin.name == name)
    expected = twin.expected()
    for lane, value in changed.items():
        expected[lane] = value
    with settings(all_lanes=False, seed=seed):
        result = twin.run(faulty=True)
    written = ~expected.isnan()
    assert torch.equal(result[written], expected[written])


def test_a_barrier_that_threads_miss_is_a_fault_where_all_lanes_is_off() -> None:
    twin = next(twin for twin in DIVERGENCE if twin.name == "early return before a barrier")
    with settings(all_lanes=False), pytest.raises(mps_simulator.Fault, match="divergent threadgroup_barrier"):
        twin.run(faulty=True)


def test_unwatched_lets_faults_pass() -> None:
    """Without the watch, a fault that the watch reports (a race that gives the right values) passes."""
    twin = next(twin for twin in ORDER if twin.name == "only simdgroup_barrier between simdgroups")
    with settings(watch=False, seed=0):
        twin.run(faulty=True)
