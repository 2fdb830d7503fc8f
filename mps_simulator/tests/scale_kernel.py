"""A kernel for y = 2 x, and calls that encode it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import mps_simulator
from mps_simulator import metal

SOURCE = """
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint& n [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
  if (i < n) y[i] = 2 * x[i];
}
"""
N = 40


def ramp() -> torch.Tensor:
    return torch.arange(float(N)).to("mps")


def doubled() -> list[float]:
    return [2.0 * i for i in range(N)]


def set_scale(encoder: Any, pipeline: Any, x: Any, y: Any, count: int = N) -> None:
    encoder.set_pipeline(pipeline)
    encoder.set_buffer(x, 0)
    encoder.set_buffer(y, 1)
    encoder.set_bytes(count, 2)


def encode_scale(encoder: Any, pipeline: Any, x: Any, y: Any, count: int = N) -> None:
    set_scale(encoder, pipeline, x, y, count)
    encoder.dispatch_threadgroups((2, 1, 1), (32, 1, 1))


def scaled(pipeline: Any, x: Any, y: Any, **options: Any) -> Any:
    """Returns a command buffer of its own queue that computes y from x, and is not yet committed."""
    command_buffer = metal.CommandQueue().command_buffer(**options)
    encoder = command_buffer.compute_encoder()
    encode_scale(encoder, pipeline, x, y)
    encoder.end_encoding()
    return command_buffer


def faults(words: str) -> Any:
    return pytest.raises(mps_simulator.Fault, match=re.escape(words))
