"""The stages of the gradients of the chunked rule, which are derivatives of the forward stages.

g is g_cumsum. Each dg is the gradient of the log decays, not of their sums.
"""

import torch
from torch import Tensor

from torch_gdn.reference.common import chunk_rows, chunks, compute_dtype, gradients, per_value_head
from torch_gdn.reference.gdn import chunk_fwd_o, chunk_scaled_dot_kkt, recompute_w_u, solve_tril

__all__ = ["chunk_bwd_dqkwg", "chunk_bwd_dv_local", "chunk_gated_delta_rule_bwd_dhu", "prepare_wy_repr_bwd"]


def chunk_bwd_dv_local(
    q: Tensor, k: Tensor, do: Tensor, g: Tensor, scale: float | None = None, cu_seqlens: Tensor | None = None,
    chunk_size: int = 16,
) -> Tensor | None:  # fmt: skip
    """The gradient of v_new from the outputs of its own chunk."""
    batch, tokens, value_heads, V = do.shape
    rows = chunk_rows(tokens, chunk_size, cu_seqlens, None)
    h = q.new_zeros(batch, rows, value_heads, q.shape[-1], V, dtype=compute_dtype(q))

    def output(v: Tensor) -> Tensor:
        return chunk_fwd_o(q, k, v, h, g, scale, False, cu_seqlens, chunk_size)

    (dv,) = gradients(output, (torch.zeros_like(do),), (do,))
    return dv


def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, g: Tensor, h0: Tensor | None = None,
    dht: Tensor | None = None, scale: float | None = None, cu_seqlens: Tensor | None = None, chunk_size: int = 16,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Chunk by chunk, from the last: dv2 = dv + k_write dS, then dS <- exp(g_last) dS + q_read^T do - w^T dv2.

    dh holds the dS after each chunk.
    """
    dtype = compute_dtype(q)
    batch, tokens, value_heads, V = do.shape
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = scale * per_value_head(q, value_heads).to(dtype), per_value_head(k, value_heads).to(dtype)
    w, do, dv2, g = w.to(dtype), do.to(dtype), dv.to(dtype, copy=True), g.to(dtype)
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    dstate = q.new_zeros(count, value_heads, q.shape[-1], V)
    if dht is not None:
        dstate.copy_(dht)
    dh = q.new_zeros(batch, chunk_rows(tokens, chunk_size, cu_seqlens, chunk_indices), *dstate.shape[1:])
    for n, b, first, last, row in reversed(list(chunks(batch, tokens, chunk_size, cu_seqlens))):
        here, g_last = slice(first, last), g[b, last - 1]
        dh[b, row] = dstate[n]
        k_write = k[b, here] * (g_last - g[b, here]).exp()[..., None]
        dv2[b, here] += torch.einsum("ihk,hkv->ihv", k_write, dstate[n])
        from_outputs = torch.einsum("ihk,ihv->hkv", q[b, here] * g[b, here].exp()[..., None], do[b, here])
        from_values = torch.einsum("ihk,ihv->hkv", w[b, here], dv2[b, here])
        dstate[n] = g_last.exp()[:, None, None] * dstate[n] + from_outputs - from_values
    return dh, None if h0 is None else dstate, dv2


def later_sums(dg: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """Makes the gradient of log decays from that of their sums within chunks."""
    assert dg is not None
    out = torch.empty_like(dg)
    for _, b, first, last, _ in chunks(dg.shape[0], dg.shape[1], chunk_size, cu_seqlens):
        out[b, first:last] = dg[b, first:last].flip(0).cumsum(0).flip(0)
    return out


def prepare_wy_repr_bwd(
    k: Tensor, v: Tensor, beta: Tensor, dw: Tensor, du: Tensor, g: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of `recompute_w_u`, whose A depends on k, beta and g."""

    def w_and_u(k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        inverse = solve_tril(chunk_scaled_dot_kkt(k, g, beta, cu_seqlens, 16), cu_seqlens)
        return recompute_w_u(k, v, beta, inverse, g, cu_seqlens)

    *others, dg = gradients(w_and_u, (k, v, beta, g), (dw, du))
    return *others, later_sums(dg, cu_seqlens, 16)


def chunk_bwd_dqkwg(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, dv: Tensor, g: Tensor,
    scale: float | None = None, cu_seqlens: Tensor | None = None, chunk_size: int = 16,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of a chunk's outputs, of v_new = u - w h, and of the state after it, with v_new and h fixed."""
    batch, tokens, value_heads, _ = v.shape

    def stage(q: Tensor, k: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, read, after = per_value_head(k, value_heads), torch.zeros_like(v), torch.zeros_like(h)
        for _, b, first, last, row in chunks(batch, tokens, chunk_size, cu_seqlens):
            here, g_last = slice(first, last), g[b, last - 1]
            read[b, here] = -torch.einsum("ihk,hkv->ihv", w[b, here], h[b, row])
            k_write = keys[b, here] * (g_last - g[b, here]).exp()[..., None]
            written = torch.einsum("ihk,ihv->hkv", k_write, v[b, here])
            after[b, row] = g_last.exp()[:, None, None] * h[b, row] + written
        return chunk_fwd_o(q, k, v, h, g, scale, False, cu_seqlens, chunk_size), read, after

    w = q.new_zeros(batch, tokens, value_heads, q.shape[-1])
    *others, dg = gradients(stage, (q, k, w, g), (do, dv, dh))
    return *others, later_sums(dg, cu_seqlens, chunk_size)
