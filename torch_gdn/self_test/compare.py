"""Compares the results of two kernels for one call: are they the same up to rounding?

It looks for a wrong head, row or factor. Rounding to 16 bits gives errors of up to 1e-2.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_ERROR = 0.05  # of a piece, relative to its own norm, or to that of the average piece if that is larger
LARGEST_SHARE = 0.25  # of integers that may differ: codes of values near the middle between two
PIECE = 32  # elements


def problem_of(name: str, result: Tensor, expected: Tensor, before: Tensor | None = None) -> str | None:
    """Returns what is wrong with `result`, or "". Elements that were NaN `before` and still are were not written.

    Returns None if the CPU's kernel computed NaN or an infinity. Where one spreads depends on the algorithm.
    """
    same = (result == expected) | (result.isnan() & expected.isnan() & (before is not None and before.isnan()))
    if not result.is_floating_point():
        changed = ~same if before is None else (result != before) | (expected != before)
        share = (~same).sum().item() / max(1, same.numel() if before is None else int(changed.sum()))
        return f"{name}: {share:.0%} of the integers differ" if share > LARGEST_SHARE else ""
    if not (expected.isfinite() | same).all():
        return None
    if not (result.isfinite() | same).all():
        return f"{name}: NaN or infinite where the CPU's kernel has numbers"
    expected = expected.float().nan_to_num(0, 0, 0)
    difference = pieces(torch.where(same, 0, result.float() - expected))
    sizes = pieces(expected)
    average = sizes.square().mean().sqrt()
    error = (difference / sizes.maximum(average)).nan_to_num(0, torch.inf).max().item() if len(sizes) else 0.0
    return f"{name}: error {error:.3g}, expected at most {LARGEST_ERROR}" if error > LARGEST_ERROR else ""


def pieces(x: Tensor) -> Tensor:
    """Returns the norm of each piece."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % PIECE)).view(-1, PIECE).norm(dim=-1)
