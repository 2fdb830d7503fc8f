from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import chunk_rows, chunks, compute_dtype, key_first, per_value_head


def chunk_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chunk by chunk: v_new = u - w S, then S <- exp(g_last) S + (k exp(g_last - g))^T v_new.

    g is g_cumsum; h holds the S before each chunk.
    """
    dtype = compute_dtype(k)
    batch, tokens, value_heads, V = u.shape
    K = k.shape[-1]
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    k, w, g_cumsum = per_value_head(k, value_heads).to(dtype), w.to(dtype), g.to(dtype)
    state = k.new_zeros(count, value_heads, K, V)
    if initial_state is not None:
        state.copy_(key_first(initial_state, state_v_first))
    h = k.new_zeros(batch, chunk_rows(tokens, chunk_size, cu_seqlens, chunk_indices), value_heads, K, V)
    v_new = u.to(dtype, copy=True)
    for n, b, first, last, row in chunks(batch, tokens, chunk_size, cu_seqlens):
        here = slice(first, last)
        h[b, row] = state[n]
        v_new[b, here] -= torch.einsum("ihk,hkv->ihv", w[b, here], state[n])
        g_last = g_cumsum[b, last - 1]
        decayed_k = k[b, here] * (g_last - g_cumsum[b, here]).exp()[..., None]
        state[n] = g_last.exp()[:, None, None] * state[n] + torch.einsum("ihk,ihv->hkv", decayed_k, v_new[b, here])
    final_state = key_first(state, state_v_first).contiguous() if output_final_state else None
    return key_first(h, state_v_first).contiguous().to(u.dtype), v_new.to(u.dtype), final_state
