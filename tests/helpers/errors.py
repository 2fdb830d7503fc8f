"""Asserts that results are within a bound of the exact ones (check/torch_gdn_check/registry/bounds.py), or equal bit
for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_gdn_check.registry.bounds import (
    CHUNK_OUTPUT,
    CHUNK_STATE,
    RECURRENT_F32,
    RECURRENT_OUTPUT,
    STAGE_OUTPUT,
    chunk_f32,
    compare,
    head_errors,
    relative_error,
)

__all__ = [
    "CHUNK_OUTPUT",
    "CHUNK_STATE",
    "RECURRENT_F32",
    "RECURRENT_OUTPUT",
    "STAGE_OUTPUT",
    "assert_close",
    "assert_same_bits",
    "chunk_f32",
    "head_errors",
    "relative_error",
    "sum_error",
]

NARROWEST = 4  # lanes of the narrowest variant of the CPU kernels


def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Returns how far the rounding of a sum of squares takes a norm, which divides by its root.

    The narrowest variant adds terms / 4 squares in turn in each of 4 lanes. Each addition rounds the sum so far, by
    0.3 x 2^-24 on average, so that n of them change the whole by 0.3 x 2^-24 sqrt(n / 3). The mean of the lanes and the
    root halve that once each. This is 6 times the result, for the largest of many rows. A wider variant has less.
    """
    return 2**-24 * math.sqrt(terms / NARROWEST) / 4 if dtype == torch.float32 else 0.0


def assert_close(name: str, x: Tensor, exact: Tensor, bound: float, head_dim: int | None = 2) -> None:
    """Compares the tensor and each head with the bound. For 16-bit dtypes, 1.05 x the error of rounding also passes."""
    for part in compare(name, x, exact, bound, head_dim):
        assert part.kept, str(part)


def assert_same_bits(name: str, x: Tensor, expected: Tensor) -> None:
    x, expected = x.cpu(), expected.cpu()
    assert x.dtype == expected.dtype and x.shape == expected.shape, f"{name}: {x.dtype} {tuple(x.shape)}"
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    different = (x.contiguous().view(words) != expected.contiguous().view(words)).sum().item()
    assert different == 0, f"{name}: {different} of {x.numel()} values differ"
