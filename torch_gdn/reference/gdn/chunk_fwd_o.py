from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import chunks, compute_dtype, key_first, per_value_head
from torch_gdn.reference.gdn.chunk_scaled_dot_kkt import masked_decay


def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> Tensor:
    """o = scale ((q exp(g)) h + tril(q k^T exp(g_i - g_j)) v) in each chunk; v is v_new, g is g_cumsum."""
    dtype = compute_dtype(q)
    batch, tokens, value_heads, _ = v.shape
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = per_value_head(q, value_heads).to(dtype), per_value_head(k, value_heads).to(dtype)
    h, g_cumsum, v_new = key_first(h, state_v_first).to(dtype), g.to(dtype), v.to(dtype)
    o = torch.empty_like(v_new)
    for _, b, first, last, row in chunks(batch, tokens, chunk_size, cu_seqlens):
        here = slice(first, last)
        earlier = torch.einsum("ihk,hkv->ihv", q[b, here] * g_cumsum[b, here].exp()[..., None], h[b, row])
        scores = torch.einsum("ihk,jhk->ihj", q[b, here], k[b, here]) * masked_decay(g_cumsum[b, here], diagonal=0)
        o[b, here] = scale * (earlier + torch.einsum("ihj,jhv->ihv", scores, v_new[b, here]))
    return o.to(v.dtype)
