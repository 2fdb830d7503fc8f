from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import chunks, compute_dtype, per_value_head


def chunk_scaled_dot_kkt(
    k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, chunk_size: int = 64
) -> Tensor:
    """A[i, j] = beta_i (k_i . k_j) exp(g_i - g_j) for i > j in a chunk; g is g_cumsum."""
    dtype = compute_dtype(k)
    batch, tokens, value_heads = g.shape
    k, g_cumsum, beta = per_value_head(k, value_heads).to(dtype), g.to(dtype), beta.to(dtype)
    A = k.new_zeros(batch, tokens, value_heads, chunk_size)
    for _, b, first, last, _ in chunks(batch, tokens, chunk_size, cu_seqlens):
        here = slice(first, last)
        products = torch.einsum("ihk,jhk->ihj", k[b, here], k[b, here])
        A[b, here, :, : last - first] = beta[b, here, :, None] * products * masked_decay(g_cumsum[b, here], diagonal=-1)
    return A


def masked_decay(g_cumsum: Tensor, diagonal: int) -> Tensor:
    """exp(g_i - g_j) as [i, head, j] for j <= i + diagonal, else 0; masked before exp, which may overflow above it."""
    difference = g_cumsum[:, :, None] - g_cumsum.T[None]
    size = len(g_cumsum)
    kept = torch.ones(size, size, dtype=torch.bool, device=g_cumsum.device).tril(diagonal)[:, None]
    return difference.masked_fill(~kept, -torch.inf).exp()
