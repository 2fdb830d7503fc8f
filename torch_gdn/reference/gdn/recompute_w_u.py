from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import chunks, compute_dtype, per_value_head


def recompute_w_u(
    k: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """w = A (beta k exp(g)), u = A (beta v) in each chunk; A is A_inv, g is g_cumsum."""
    dtype = compute_dtype(k)
    batch, tokens, value_heads, _ = v.shape
    g_cumsum, beta = g.to(dtype), beta.to(dtype)
    scaled_k = per_value_head(k, value_heads).to(dtype) * (beta * g_cumsum.exp())[..., None]
    scaled_v = v.to(dtype) * beta[..., None]
    w, u = torch.empty_like(scaled_k), torch.empty_like(scaled_v)
    for _, b, first, last, _ in chunks(batch, tokens, A.shape[-1], cu_seqlens):
        here = slice(first, last)
        A_inv = A[b, here, :, : last - first].to(dtype)
        w[b, here] = torch.einsum("ihj,jhk->ihk", A_inv, scaled_k[b, here])
        u[b, here] = torch.einsum("ihj,jhv->ihv", A_inv, scaled_v[b, here])
    return w.to(k.dtype), u.to(v.dtype)
