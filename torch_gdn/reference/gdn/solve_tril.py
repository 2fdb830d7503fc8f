from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import chunks


def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """(I + A)^-1 of each chunk's strictly lower triangular block of A [B, T, HV, chunk_size]."""
    batch, tokens, _, chunk_size = A.shape
    inverse = torch.zeros_like(A)
    for _, b, first, last, _ in chunks(batch, tokens, chunk_size, cu_seqlens):
        size = last - first
        block = A[b, first:last, :, :size].transpose(0, 1).tril(-1)
        identity = torch.eye(size, dtype=A.dtype, device=A.device)
        solved = torch.linalg.solve_triangular(block + identity, identity, upper=False, unitriangular=True)
        inverse[b, first:last, :, :size] = solved.transpose(0, 1)
    return inverse
