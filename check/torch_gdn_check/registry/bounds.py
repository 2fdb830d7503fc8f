"""Measures how far a result is from the exact one, and says how far it may be.

An error is ||x - exact|| / ||exact||, of the whole tensor and of each head. `exact` is computed in float64 from the
kernel's own inputs. A result of zeros has an error of 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RECURRENT_F32 = 2e-7
KDA_F32 = 1e-6
# These are the errors of FLA's own kernels (tests/golden/index.json: about 3.3e-3 and 4.0e-4 for the chunked output),
# times 1.05.
CHUNK_OUTPUT = {torch.bfloat16: 3.5e-3, torch.float16: 4.2e-4}
CHUNK_STATE = {torch.bfloat16: 2.9e-3, torch.float16: 3.4e-4}
RECURRENT_OUTPUT = {torch.bfloat16: 1.75e-3, torch.float16: 2.2e-4}
STAGE_OUTPUT = {torch.bfloat16: 3.5e-3, torch.float16: 4.4e-4}
# These are bounds of a float32 stage compared with FLA's recorded result, which has FLA's own error (TF32 for A).
STAGE_BESIDE_FLA = {"g_cumsum": 2e-5, "A": 2e-5, "A_inv": 5e-6}
# This is the bound of an op that computes an output in float32 from a few numbers and rounds it once.
ROUNDING = {torch.float32: 3e-7, torch.bfloat16: 1.8e-3, torch.float16: 2.2e-4}
OF_FLA = 1.05  # the end-to-end ops may have this multiple of FLA's own error


def chunk_f32(largest_g_cumsum: float) -> float:
    """Returns the bound of a chunked result in float32 if the cumulative gate reaches this magnitude."""
    return 2e-6 + 1e-7 * largest_g_cumsum


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Returns ||x - exact|| / ||exact||, and 0 for two tensors of zeros (or two empty ones)."""
    difference, size = (x - exact).norm().item(), exact.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def head_errors(x: Tensor, exact: Tensor, head_dim: int) -> list[float]:
    heads = zip(x.unbind(head_dim), exact.unbind(head_dim), strict=True)
    return [relative_error(ours, theirs) for ours, theirs in heads]


@dataclass(frozen=True)
class Part:
    """A comparison of a tensor as a whole, or of one of its heads."""

    tensor: str
    part: str
    error: float
    bound: float

    @property
    def kept(self) -> bool:
        return self.error <= self.bound  # false for nan

    @property
    def share(self) -> float:
        """Returns the error as a share of the bound. More than 1 is too much."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.bound if self.bound else float("inf") if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.tensor}: error {self.error:.3g} of {self.part}, expected at most {self.bound:.3g}"


def compare(name: str, x: Tensor, exact: Tensor, bound: float, head_dim: int | None = 2) -> list[Part]:
    """Compares the tensor and each head with the bound. For 16-bit dtypes, 1.05 x the error of rounding also passes.

    The latter matters for few values: rounding 128 numbers has another error than rounding a million.
    """
    if x.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(x.shape)}, expected {tuple(exact.shape)}")
    rounded = exact.to(x.dtype).double()
    x, exact = x.detach().cpu().double(), exact.double()
    errors = [("the whole", relative_error(x, exact), relative_error(rounded, exact))]
    if head_dim is not None:
        pairs = zip(head_errors(x, exact, head_dim), head_errors(rounded, exact, head_dim), strict=True)
        errors += [(f"head {i}", ours, rounding) for i, (ours, rounding) in enumerate(pairs)]
    return [Part(name, part, error, max(bound, OF_FLA * rounding)) for part, error, rounding in errors]


def differing(name: str, x: Tensor, exact: Tensor, bound: float) -> Part:
    """Returns the share of integers that differ."""
    if x.shape != exact.shape or x.dtype != exact.dtype:
        raise AssertionError(f"{name}: {x.dtype} {tuple(x.shape)}, expected {exact.dtype} {tuple(exact.shape)}")
    return Part(name, "the whole", (x.cpu() != exact).double().mean().item(), bound)


def compare_with_fla(name: str, x: Tensor, theirs: Tensor, exact: Tensor, recorded: float, head_dim: int) -> list[Part]:
    """Allows 1.05 x FLA's error: the recorded one for the tensor, and that of FLA's own output for each head."""
    ours, theirs = x.detach().cpu().double(), theirs.double()
    parts = [Part(name, "the whole", relative_error(ours, exact), OF_FLA * recorded)]
    heads = zip(head_errors(ours, exact, head_dim), head_errors(theirs, exact, head_dim), strict=True)
    return parts + [Part(name, f"head {i}", ours, OF_FLA * theirs) for i, (ours, theirs) in enumerate(heads)]


def worst(parts: Iterable[Part]) -> Part:
    return max(parts, key=lambda part: part.share)
