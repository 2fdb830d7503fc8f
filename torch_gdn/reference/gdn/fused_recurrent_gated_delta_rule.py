from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import beta_of, compute_dtype, key_first, log_decay_of, per_value_head, sequences
from torch_gdn.reference.layers.l2norm import l2norm


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule as defined, token by token: decay, read, write, output. In float64 it is the oracle."""
    out_dtype, dtype = output_dtype or q.dtype, compute_dtype(q)
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
    # Of each token, broadcast to [HV, K, V].
    decay = g.exp()[..., None, None]
    if gk is not None:
        decay = decay * gk.to(dtype).exp()[..., :, None]
    if gv is not None:
        decay = decay * gv.to(dtype).exp()[..., None, :]

    if cu_seqlens is None:
        state = q.new_zeros(batch, value_heads, K, V)
    else:
        state = q.new_zeros(len(cu_seqlens) - 1, value_heads, K, V)
    if initial_state is not None:
        state.copy_(key_first(initial_state, state_v_first))
    o = torch.empty_like(v)
    if cu_seqlens is None:
        for t in range(tokens):  # every row of the batch at once
            state, o[:, t] = one_token(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t])
    else:
        for n, b, first, last, _ in sequences(batch, tokens, cu_seqlens):
            for t in range(first, last):
                state[n], o[b, t] = one_token(state[n], q[b, t], k[b, t], v[b, t], decay[b, t], beta[b, t])
    final_state = key_first(state, state_v_first).contiguous() if output_final_state else None
    return (scale * o).to(out_dtype), final_state


def one_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = decay * state
    update = beta * (v - torch.einsum("...kv,...k->...v", state, k))
    state = state + k[..., :, None] * update[..., None, :]
    return state, torch.einsum("...kv,...k->...v", state, q)
