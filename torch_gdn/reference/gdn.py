"""The gated delta rule: as defined, in chunks, and the six stages of the chunks."""

import torch
from torch import Tensor

from torch_gdn.reference.common import (
    LOWEST_LOG_DECAY,
    beta_of,
    chunk_rows,
    chunks,
    compute_dtype,
    key_first,
    log_decay_of,
    per_value_head,
    sequences,
)
from torch_gdn.reference.layers import causal_conv1d_update_, l2norm, rms_norm_gated

__all__ = [
    "chunk_fwd_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt",
    "fused_recurrent_gated_delta_rule",
    "gdn_decode_",
    "recompute_w_u",
    "solve_tril",
]


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes the gated delta rule as defined, token by token: decay, read, write, output. Tests compare with it in
    float64.
    """
    out_dtype, dtype = output_dtype or v.dtype, compute_dtype(q)
    batch, tokens, value_heads, V = v.shape
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    g = q.new_zeros(batch, tokens, value_heads) if g is None else g.to(dtype)
    beta = q.new_ones(batch, tokens, value_heads) if beta is None else beta.to(dtype)
    g = log_decay_of(g, use_gate_in_kernel, A_log, dt_bias)
    beta = beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if beta.dim() == 3:
        beta = beta[..., None]
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (per_value_head(x, value_heads, head_grouping) for x in (q, k))
    # The values of a token are broadcast to [HV, K, V].
    decay = g.exp()[..., None, None]
    if gk is not None:
        decay = decay * gk.to(dtype).exp()[..., :, None]
    if gv is not None:
        decay = decay * gv.to(dtype).exp()[..., None, :]

    state = q.new_zeros(batch if cu_seqlens is None else len(cu_seqlens) - 1, value_heads, K, V)
    if initial_state is not None:
        state.copy_(key_first(initial_state, state_v_first))
    o = torch.empty_like(v)
    if cu_seqlens is None:
        for t in range(tokens):  # every row of the batch at once
            state, o[:, t] = one_token(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t])
    else:
        states = list(state)  # autograd needs those that were read
        for n, b, first, last, _ in sequences(batch, tokens, cu_seqlens):
            for t in range(first, last):
                states[n], o[b, t] = one_token(states[n], q[b, t], k[b, t], v[b, t], decay[b, t], beta[b, t])
        state = torch.stack(states) if states else state
    final_state = key_first(state, state_v_first).contiguous() if output_final_state else None
    return (scale * o).to(out_dtype), final_state


def one_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = decay * state
    update = beta * (v - torch.einsum("...kv,...k->...v", state, k))
    state = state + k[..., :, None] * update[..., None, :]
    return state, torch.einsum("...kv,...k->...v", state, q)


def gdn_decode_(
    qkv: Tensor, z: Tensor | None, b: Tensor, a: Tensor | None, conv_weight: Tensor, conv_pool: Tensor, A_log: Tensor,
    dt_bias: Tensor | None, state_pool: Tensor, norm_weight: Tensor | None = None, state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, null_index: int = -1, conv_bias: Tensor | None = None,
    activation: str | None = "silu", allow_neg_eigval: bool = False, state_v_first: bool = False,
    norm_activation: str = "silu", norm_eps: float = 1e-6, round_norm: bool = False, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs a layer's convolution, gates, rule and gated norm, and updates the slots of both pools."""
    states = key_first(state_pool, state_v_first)
    _, HV, K, V = states.shape
    H = (conv_weight.shape[0] - HV * V) // (2 * K)
    if z is None:
        heads, gates = qkv.unflatten(-1, (H, -1)), b.unflatten(-1, (H, -1))
        q, k, v, z = (x.flatten(2) for x in heads.split([K, K, HV // H * V, HV // H * V], -1))
        b, a = (x.flatten(2) for x in gates.chunk(2, -1))
        qkv = torch.cat((q, k, v), -1)
    slots = (state_indices, has_initial_state, null_index)
    mixed = causal_conv1d_update_(qkv, conv_weight, conv_pool, *slots, conv_bias, activation, cu_seqlens)
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    count = qkv.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    indices = torch.arange(count) if state_indices is None else state_indices.cpu().long()
    present = indices > (-1 if state_indices is None else null_index)
    initial_state = states[indices.clamp(min=0)]
    if has_initial_state is not None:
        initial_state[~has_initial_state] = 0
    o, final_state = fused_recurrent_gated_delta_rule(
        q.unflatten(-1, (H, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (HV, V)),
        a,
        b,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
    )
    assert final_state is not None
    states[indices[present]] = final_state[present].to(states.dtype)
    for n, batch, first, last, _ in sequences(qkv.shape[0], qkv.shape[1], cu_seqlens):
        o[batch, first:last] *= bool(present[n])
    return rms_norm_gated(o, z.unflatten(-1, (HV, V)), norm_weight, norm_eps, norm_activation, round_norm)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int = 64,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes the gated delta rule a chunk of tokens at a time: the six stages, with nothing rounded between them."""
    out_dtype, dtype = output_dtype or v.dtype, compute_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (per_value_head(x, v.shape[2], head_grouping) for x in (q, k))
    g = log_decay_of(g.to(dtype), use_gate_in_kernel, A_log, dt_bias)
    beta = beta_of(beta.to(dtype), use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g_cumsum = chunk_local_cumsum(g, chunk_size, cu_seqlens)
    A = chunk_scaled_dot_kkt(k, g_cumsum, beta, cu_seqlens, chunk_size)
    A_inv = solve_tril(A, cu_seqlens)
    w, u = recompute_w_u(k, v, beta, A_inv, g_cumsum, cu_seqlens)
    h, v_new, final_state = chunk_fwd_h(
        k, w, u, g_cumsum, initial_state, output_final_state, chunk_size, state_v_first, cu_seqlens
    )
    o = chunk_fwd_o(q, k, v_new, h, g_cumsum, scale, state_v_first, cu_seqlens, chunk_size)
    return o.to(out_dtype), final_state


def chunk_local_cumsum(g: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None) -> Tensor:
    """Sums g [B, T, HV] from the start of each token's chunk up to the token."""
    g = g.to(compute_dtype(g)).clamp(min=LOWEST_LOG_DECAY)
    out = torch.empty_like(g)
    for _, b, first, last, _ in chunks(g.shape[0], g.shape[1], chunk_size, cu_seqlens):
        out[b, first:last] = g[b, first:last].cumsum(0)
    return out


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
    """Returns exp(g_i - g_j) as [i, head, j] for j <= i + diagonal, else 0. It masks before exp, which may overflow."""
    difference = g_cumsum[:, :, None] - g_cumsum.T[None]
    size = len(g_cumsum)
    kept = torch.ones(size, size, dtype=torch.bool, device=g_cumsum.device).tril(diagonal)[:, None]
    return difference.masked_fill(~kept, -torch.inf).exp()


def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns (I + A)^-1 of each chunk's strictly lower triangular block of A [B, T, HV, chunk_size]."""
    batch, tokens, _, chunk_size = A.shape
    inverse = torch.zeros_like(A)
    for _, b, first, last, _ in chunks(batch, tokens, chunk_size, cu_seqlens):
        size = last - first
        block = A[b, first:last, :, :size].transpose(0, 1).tril(-1)
        identity = torch.eye(size, dtype=A.dtype, device=A.device)
        solved = torch.linalg.solve_triangular(block + identity, identity, upper=False, unitriangular=True)
        inverse[b, first:last, :, :size] = solved.transpose(0, 1)
    return inverse


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


def chunk_fwd_h(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    chunk_size: int = 64, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
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


def chunk_fwd_o(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor, scale: float | None = None, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, chunk_size: int = 64,
) -> Tensor:  # fmt: skip
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
