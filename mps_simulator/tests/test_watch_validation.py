"""Tests what Apple's validation layer rejects when a dispatch is encoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mps_simulator
from metal_programs import Argument, run

COPY = """
kernel void copy(device const float4* source [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint2& count [[buffer(2)]], constant half* scale [[buffer(3)]],
                 threadgroup float* tile [[threadgroup(1)]], uint i [[thread_position_in_grid]]) {
  if (i < count.x) {
    tile[i] = source[i / 4][i % 4] * scale[0];
    out[i] = tile[i];
  }
}
"""
SMALL = """
[[max_total_threads_per_threadgroup(64)]]
kernel void small(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = i; }
"""


def copy(**changes: Any) -> torch.Tensor:
    """Makes a dispatch that is correct except for `changes`: arguments by name, or options of run()."""
    out = torch.empty(64, device="mps")
    arguments: dict[str, Argument] = {
        "source": torch.arange(64, dtype=torch.float32).to("mps"),
        "out": out,
        "count": (64).to_bytes(4, "little") + bytes(4),
        "scale": torch.tensor([2, 3, 4], dtype=torch.float16).to("mps"),
    }
    arguments |= {name: changes.pop(name) for name in list(changes) if name in arguments}
    options: dict[str, Any] = {"threads": 64, "threadgroup_memory": {1: 256}} | changes
    run(COPY, list(arguments.values()), **options)
    return out.cpu()


def test_the_correct_dispatch_passes() -> None:
    assert torch.equal(copy(), 2 * torch.arange(64, dtype=torch.float32))


def test_offsets_that_fit_pass() -> None:
    source = torch.arange(80, dtype=torch.float32).to("mps")
    scale = torch.tensor([2, 3, 4], dtype=torch.float16).to("mps")
    out = copy(source=(source, 16), scale=(scale, 4))
    assert torch.equal(out, 4 * torch.arange(4, 68, dtype=torch.float32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": None}, r"argument 'source' \(buffer 0\) is not set"),
        ({"count": None}, r"argument 'count' \(buffer 2\) is not set"),
        ({"threadgroup_memory": {}}, r"argument 'tile' \(threadgroup 1\) is not set"),
        ({"threadgroup_memory": {1: 256, 0: 40}}, r"multiple of 16, got 40"),
        ({"threadgroup_memory": {1: 32768, 2: 16}}, r"at most 32768 bytes, got 32784"),
        ({"count": bytes(4)}, r"argument 'count' \(buffer 2\): expected at least 8 bytes, got 4"),
        ({"out": bytes(256)}, r"argument 'out' \(buffer 1\): setBytes gives read-only bytes"),
        ({"threadgroups": (1, 0, 1)}, r"grid must not be empty, got \(1, 0, 1\)"),
        ({"grid": 0}, r"grid must not be empty, got \(0, 1, 1\)"),
        ({"threadgroups": (1 << 20, 1 << 20, 1 << 30)}, r"fewer than 2\^31 threadgroups"),
        ({"threads": (64, 0, 1)}, r"threads per threadgroup must not be zero, got \(64, 0, 1\)"),
        ({"threads": (64, 17, 1)}, r"at most 1024 in all, got \(64, 17, 1\)"),
    ],
)
def test_a_wrong_dispatch_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(mps_simulator.Fault, match=rf"kernel 'copy': .*{words}"):
        copy(**changes)


@pytest.mark.parametrize(
    ("argument", "offset", "words"),
    [
        ("source", 256, r"argument 'source' \(buffer 0\): offset 256 is not inside its buffer"),
        ("source", 8, r"argument 'source' \(buffer 0\): offset must be a multiple of 16, got 8"),
        ("scale", 2, r"argument 'scale' \(buffer 3\): offset must be a multiple of 4, got 2"),
    ],
)
def test_a_wrong_offset_is_rejected(argument: str, offset: int, words: str) -> None:
    tensors = {"source": torch.zeros(64).to("mps"), "scale": torch.zeros(3, dtype=torch.float16).to("mps")}
    with pytest.raises(mps_simulator.Fault, match=rf"kernel 'copy': {words}"):
        copy(**{argument: (tensors[argument], offset)})


def test_an_offset_past_the_end_is_rejected() -> None:
    with pytest.raises(mps_simulator.Fault, match=r"offset 260 "):
        copy(source=(torch.zeros(64).to("mps"), 260))


def test_a_kernel_s_own_limit_of_threads() -> None:
    out = torch.empty(64, device="mps")
    run(SMALL, [out], threads=64)
    assert torch.equal(out.cpu(), torch.arange(64, dtype=torch.float32))
    with pytest.raises(mps_simulator.Fault, match=r"kernel 'small': .*at most 64 in all, got \(65, 1, 1\)"):
        run(SMALL, [torch.empty(65, device="mps")], threads=65)


def test_an_index_above_30_is_rejected() -> None:
    with pytest.raises(mps_simulator.Fault, match=r"31.*30"):
        run(SMALL, [torch.empty(64, device="mps"), *[None] * 30, 1])
