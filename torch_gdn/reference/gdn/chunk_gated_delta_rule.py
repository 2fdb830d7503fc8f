from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import beta_of, compute_dtype, log_decay_of, per_value_head
from torch_gdn.reference.gdn.chunk_fwd_h import chunk_fwd_h
from torch_gdn.reference.gdn.chunk_fwd_o import chunk_fwd_o
from torch_gdn.reference.gdn.chunk_local_cumsum import chunk_local_cumsum
from torch_gdn.reference.gdn.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt
from torch_gdn.reference.gdn.recompute_w_u import recompute_w_u
from torch_gdn.reference.gdn.solve_tril import solve_tril
from torch_gdn.reference.layers.l2norm import l2norm


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, a chunk of tokens at a time: the six stages, with nothing rounded between them."""
    out_dtype, dtype = output_dtype or q.dtype, compute_dtype(q)
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
