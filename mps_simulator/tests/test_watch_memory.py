"""Tests the watch's faults: out of bounds, misaligned, not writable, memory never written, two names for memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mps_simulator
from metal_programs import Argument, run
from mps_simulator import settings
from twins import BARRIER, IN_GROUP, PARAMETERS, THREAD, N, Twin, both_tests, ramp, thread, unwritten

BOUNDS = [
    Twin(
        "read past the end",
        "out[i] = source[i@];",
        (" + 1", ""),
        [
            r"out of bounds read of 4 bytes",
            r"argument 'source' \(buffer 0\), element 64 \(byte offset 256\)",
            r"it has 64 elements",
            thread(63),
        ],
    ),
    Twin(
        "read before the beginning",
        "out[i] = source[@];",
        ("int(i) - 1", "i"),
        [r"out of bounds read", r"argument 'source' \(buffer 0\), element -1 \(byte offset -4\)", thread(0)],
    ),
    Twin(
        "read before the argument's offset, inside its buffer",
        "out[i] = source[@];",
        ("int(i) - 2", "i"),
        [r"out of bounds read", r"argument 'source' \(buffer 0\), element -[12] ", THREAD],
        arguments=lambda: [ramp(N + 8)[8:], unwritten()],
        expected=lambda: torch.arange(8, N + 8, dtype=torch.float32),
    ),
    Twin(
        "write past the end",
        "out[i] = source[i]; @",
        ("if (i == 3) out[64] = 1;", ""),
        [r"out of bounds write", r"argument 'out' \(buffer 1\), element 64 \(byte offset 256\)", thread(3)],
    ),
    Twin(
        "write before the beginning",
        "out[i] = source[i]; @",
        ("if (i == 3) out[-5] = 1;", ""),
        [r"out of bounds write", r"argument 'out' \(buffer 1\), element -5 \(byte offset -20\)", thread(3)],
    ),
    Twin(
        "vector that sticks out of the end",
        "out[i] = source[i]; @",
        ("if (i == 0) out[0] = dot(*(device const float4*)(source + 60), float4(1));", ""),
        [
            r"out of bounds read of 16 bytes",
            r"argument 'source' \(buffer 0\), element 60 \(byte offset 240\)",
            r"it has 62 elements \(248 bytes\)",
            r"thread \(0, 0, 0\)",
        ],
        arguments=lambda: [ramp(62), unwritten(62)],
        expected=lambda: torch.arange(62, dtype=torch.float32),
        threads=62,
    ),
    Twin(
        "threadgroup array overrun",
        f"threadgroup float tile[64]; tile[i@] = source[i]; {BARRIER} out[i] = tile[i];",
        (" + 1", ""),
        [r"out of bounds write", r"'tile', element 64 \(byte offset 256\)", thread(63)],
    ),
    Twin(
        "threadgroup argument underrun",
        f"tile[@] = source[i]; {BARRIER} out[i] = tile[i];",
        ("int(i) - 1", "i"),
        [r"out of bounds write", r"argument 'tile' \(threadgroup 2\), element -1 \(byte offset -4\)", thread(0)],
        threadgroup_memory={2: 4 * N},
        parameters=f"{PARAMETERS}, threadgroup float* tile [[threadgroup(2)]]",
    ),
    Twin(
        "misaligned float4",
        "out[i] = @;",
        ("dot(*(device const float4*)(source + min(i, 60u)), float4(1))", "source[i]"),
        [r"misaligned read of 16 bytes", r"argument 'source' \(buffer 0\), element \d+", r"multiple of 16", THREAD],
    ),
    Twin(
        "misaligned float4 that is assigned",
        "float4 four = float4(source[i]); @ out[i] = four.x;",
        ("four = *(device const float4*)(source + min(i, 60u));", ""),
        [r"misaligned read of 16 bytes", r"argument 'source' \(buffer 0\), element \d+", r"multiple of 16", THREAD],
    ),
    Twin(
        "float4 of a threadgroup array that is aligned for float",
        """
        @threadgroup float tile[64];
        tile[i] = source[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint n = i % 4;
        out[i] = dot(*(threadgroup const float4*)(tile + i - n), float4(n == 0, n == 1, n == 2, n == 3));
        """,
        ("", "alignas(16) "),
        [r"misaligned read of 16 bytes", r"threadgroup array 'tile', element \d+", r"must be a multiple of 16", THREAD],
    ),
    Twin(
        "write to a const argument",
        "out[i] = source[i]; @",
        ("if (i == 7) ((device float*)source)[i] = 0;", ""),
        [
            r"write of 4 bytes",
            r"argument 'source' \(buffer 0\), element 7 \(byte offset 28\), which is const",
            thread(7),
        ],
    ),
]

UNWRITTEN = [
    Twin(
        "device memory that nothing wrote",
        "out[i] @= source[i];",
        ("+", ""),
        [r"read of 4 bytes", r"argument 'out' \(buffer 1\), element \d+", r"nothing has written", THREAD],
    ),
    Twin(
        "threadgroup memory that nothing wrote",
        f"threadgroup float tile[64]; @tile[i] = source[i]; {BARRIER} out[i] = tile[i];",
        ("if (i != 9) ", ""),
        [r"read of 4 bytes", r"'tile', element 9 \(byte offset 36\)", r"nothing has written", thread(9)],
    ),
    Twin(
        "threadgroup memory that only an earlier threadgroup wrote",
        f"threadgroup float tile[32]; @tile[t] = source[i]; {BARRIER} out[i] = tile[t];",
        ("if (group == 0) ", ""),
        [
            r"read of 4 bytes",
            r"'tile', element \d+",
            r"nothing has written",
            r"thread \(\d+, 0, 0\) of threadgroup \(1, 0, 0\)",
        ],
        threadgroups=2,
        threads=32,
        parameters=f"{PARAMETERS}, {IN_GROUP}",
    ),
    Twin(
        "one byte of a word that nothing wrote",
        """
        device ushort* halves = (device ushort*)(out + i);
        ushort2 word = as_type<ushort2>(source[i]);
        halves[0] = word.x;
        @halves[1] = word.y;
        threadgroup_barrier(mem_flags::mem_device);
        out[i] += 0.0f;
        """,
        ("if (i != 5) ", ""),
        [
            r"read of 4 bytes",
            r"argument 'out' \(buffer 1\), element 5 \(byte offset 20\)",
            r"nothing has written",
            thread(5),
        ],
    ),
]

SPACE = [
    Twin(
        "too much threadgroup memory in the kernel",
        """
        threadgroup float first[4096];
        threadgroup float second[@];
        second[i] = source[i];
        first[i] = second[i];
        out[i] = first[i];
        """,
        ("4100", "4096"),
        [r"threadgroup memory", r"32784 bytes", r"at most 32768"],
    ),
]

M = 64 * N  # several pages


def whole_and_second_half() -> list[Argument]:
    whole = torch.cat([ramp(M), unwritten(M)])
    return [whole, whole[M:]]


ALIASES = [
    Twin(
        "read through one argument and written through another",
        "out[i] @ 1;",
        ("= source[i] +", "+="),
        [
            r"arguments alias: reads element 0 of argument 'source' \(buffer 0\)",
            r"and in the same memory writes element 0 of argument 'out' \(buffer 1\)",
        ],
        arguments=lambda: [ramp()] * 2,
        expected=lambda: torch.arange(1, N + 1, dtype=torch.float32),
    ),
    Twin(
        "two views of one storage",
        "out[i] = @source[i];",
        ("i == 7 ? source[4096 + 7] : ", ""),
        [r"reads element 4103 of argument 'source' .* writes element 7 of argument 'out' \(buffer 1\)"],
        arguments=whole_and_second_half,
        expected=lambda: torch.arange(M, dtype=torch.float32),
        threadgroups=64,
    ),
    Twin(
        "written through both arguments",
        "@; if (i >= 32) second[i] = i;",
        ("first[i] = 0", "if (i < 32) first[i] = i"),
        [r"writes element 32 of argument 'first' .* writes element 32 of argument 'second' \(buffer 1\)"],
        arguments=lambda: [unwritten()] * 2,
        parameters=PARAMETERS.replace("const ", "").replace("source", "first").replace("out", "second"),
    ),
]

test_the_fault_is_reported, test_the_correct_twin_passes = both_tests([*BOUNDS, *UNWRITTEN, *SPACE, *ALIASES])


def test_where_threadgroup_arrays_lie_is_left_to_the_seed() -> None:
    source = """
        kernel void apart(device int* out [[buffer(0)]]) {
          threadgroup float first[5];
          threadgroup half second[7];
          threadgroup uchar third[3];
          out[0] = int((threadgroup uchar*)second - (threadgroup uchar*)first);
          out[1] = int(third - (threadgroup uchar*)second);
          out[2] = int((ulong)first % 8);
          out[3] = int((ulong)second % 4);
          out[4] = int((ulong)third % 2);
        }
    """

    def places(seed: int) -> tuple[int, ...]:
        out = torch.zeros(5, dtype=torch.int32, device="mps")
        with settings(seed=seed):
            run(source, [out], threads=1)
        return tuple(out.tolist())

    seen = [places(seed) for seed in range(8)]
    assert {place[2:] for place in seen} == {(4, 2, 1)}, "an array is aligned as its type asks, and no more"
    assert {place[0] > 0 for place in seen} == {place[1] > 0 for place in seen} == {True, False}, "in any order"
    assert [places(seed) for seed in range(8)] == seen


def test_a_recycled_block_is_unwritten_again() -> None:
    copy = BOUNDS[0].source(False)
    first = ramp(4096)
    address = first.untyped_storage().data_ptr()
    torch.mps.synchronize()
    del first
    again = unwritten(4096)
    assert again.untyped_storage().data_ptr() == address, "the allocator did not hand out the block again"
    with pytest.raises(mps_simulator.Fault, match=r"argument 'source' \(buffer 0\), element 0 .*nothing has written"):
        run(copy, [again, unwritten()])
    again.copy_(torch.ones(4096))
    out = unwritten()
    run(copy, [again, out])
    assert torch.equal(out.cpu(), torch.ones(N))


def resident_kb(name: str) -> int:
    (kb,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kb)


def test_a_large_buffer_takes_room_where_it_is_used() -> None:
    copy = BOUNDS[0].source(False)
    torch.mps.empty_cache()
    count = 2**32 // 4
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_kb("VmRSS")
    for _ in range(2):
        large = unwritten(count)
        with pytest.raises(mps_simulator.Fault, match=r"element 0 .*nothing has written"):
            run(copy, [(large, 4 * (count - N)), unwritten()])
        large[-N:] = ramp()
        out = unwritten()
        run(copy, [(large, 4 * (count - N)), out])
        run(copy, [out, (large, 2**31)])
        assert torch.equal(large[2**29 : 2**29 + N].cpu(), torch.arange(N, dtype=torch.float32))
        torch.mps.synchronize()
        del large
    torch.mps.empty_cache()
    assert resident_kb("VmHWM") - before < 200_000


def test_only_the_last_part_of_a_dispatch_runs() -> None:
    source = """
        kernel void mark(device float* out [[buffer(0)]], uint2 group [[threadgroup_position_in_grid]]) {
          out[group.y * 2 + group.x] += 1;
        }
    """
    out = torch.zeros(6).to("mps")
    with settings(parts=3):
        run(source, [out], threadgroups=(2, 3), threads=1)
    assert out.tolist() == [0, 0, 0, 0, 1, 1]
    with (
        settings(parts=4),
        pytest.raises(mps_simulator.Fault, match="parts is 4, expected a divisor of its 6 threadgroups"),
    ):
        run(source, [out], threadgroups=(2, 3), threads=1)


def test_what_one_dispatch_writes_the_next_may_read() -> None:
    copy = BOUNDS[0].source(False)
    between, out = unwritten(), unwritten()
    run(copy, [ramp(), between])
    run(copy, [between, out])
    assert torch.equal(out.cpu(), torch.arange(N, dtype=torch.float32))
