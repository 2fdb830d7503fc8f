"""How far a result is from the exact one, and how far it may be.

An error is ||x - exact|| / ||exact||, of the whole tensor and of each head, where exact is computed in float64 from the
very inputs that the kernel got. A result of zeros has an error of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

RECURRENT_F32 = 2e-7
# What FLA's own kernels reach (tests/golden/index.json: about 3.3e-3 and 4.0e-4 for the chunked output), times 1.05.
CHUNK_OUTPUT = {torch.bfloat16: 3.5e-3, torch.float16: 4.2e-4}
CHUNK_STATE = {torch.bfloat16: 2.9e-3, torch.float16: 3.4e-4}
RECURRENT_OUTPUT = {torch.bfloat16: 1.75e-3, torch.float16: 2.2e-4}
STAGE_OUTPUT = {torch.bfloat16: 3.5e-3, torch.float16: 4.4e-4}


def chunk_f32(largest_sum: float) -> float:
    """The bound of a chunked result in float32, where the cumulative gate reaches this magnitude."""
    return 2e-6 + 1e-7 * largest_sum


def relative_error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||; 0 for two tensors of zeros (or two empty ones)."""
    difference, size = (x - exact).norm().item(), exact.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def head_errors(x: Tensor, exact: Tensor, head_dim: int) -> list[float]:
    heads = zip(x.unbind(head_dim), exact.unbind(head_dim), strict=True)
    return [relative_error(ours, theirs) for ours, theirs in heads]


def assert_close(name: str, x: Tensor, exact: Tensor, bound: float, head_dim: int | None = 2) -> None:
    """Within the bound as a whole and for each head, or, for a 16-bit dtype, within 1.05 x of what rounding costs.

    The second matters for few values: the error of rounding 128 numbers is not that of rounding a million.
    """
    assert x.shape == exact.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
    rounded = exact.to(x.dtype).double()
    x, exact = x.detach().cpu().double(), exact.double()
    errors = {"the whole": (relative_error(x, exact), relative_error(rounded, exact))}
    if head_dim is not None:
        pairs = zip(head_errors(x, exact, head_dim), head_errors(rounded, exact, head_dim), strict=True)
        errors |= {f"head {i}": pair for i, pair in enumerate(pairs)}
    for part, (error, rounding) in errors.items():
        allowed = max(bound, 1.05 * rounding)
        assert error <= allowed, f"{name}: error {error:.3g} of {part}, at most {allowed:.3g} allowed"


def assert_same_bits(name: str, x: Tensor, expected: Tensor) -> None:
    x, expected = x.cpu(), expected.cpu()
    assert x.dtype == expected.dtype and x.shape == expected.shape, f"{name}: {x.dtype} {tuple(x.shape)}"
    words = {2: torch.int16, 4: torch.int32}[x.element_size()]
    different = (x.contiguous().view(words) != expected.contiguous().view(words)).sum().item()
    assert different == 0, f"{name}: {different} of {x.numel()} values differ"
