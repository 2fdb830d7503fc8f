from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.delta_rule import Options, delta_rule, inputs_of_chunks
from torch_gdn.ops.arguments import check_cu_seqlens
from torch_gdn.ops.gdn import fla_arguments

NAME = "fused_recurrent_kda"


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Applies Kimi Delta Attention token by token: the gated delta rule with one decay per key channel.

    For each value head with state S in R^{K x V}, the rule for one token is

        S <- diag(exp(g)) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.kda.fused_recurrent_kda`, with its arguments in its order. FLA lacks `output_dtype` and
    `head_grouping`. On `mps` the kernel computes the gate; on the CPU the gate is computed before.

    Args:
        q, k, v: See `fused_recurrent_gated_delta_rule`.
        g: [B, T, HV, K], any floating dtype. The log decay (natural logarithm), or the raw gate with
            use_gate_in_kernel. Minus infinity resets the channel. A value above 0 makes the state grow and is not
            clamped.
        beta: [B, T, HV] or [B, T, HV, V], any floating dtype. The step size, for each head or for each column of S, or
            its logit with use_beta_sigmoid_in_kernel.
        A_log: HV elements in any shape, any floating dtype. Read only with use_gate_in_kernel, which requires it or
            lower_bound. Default: None.
        dt_bias: HV * K elements in any shape, any floating dtype. Read only with use_gate_in_kernel. Default: zeros.
        scale, initial_state, output_final_state: See `chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel: See `fused_recurrent_gated_delta_rule`.
        use_gate_in_kernel: Whether to use `fused_kda_gate(g, A_log, dt_bias, lower_bound)` as g. Default: False.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: See `chunk_gated_delta_rule`.
        lower_bound: A lower bound of g, below 0. Read only with use_gate_in_kernel. Default: None, for the unbounded
            gate.
        state_v_first, cu_seqlens, output_dtype, head_grouping: See `chunk_gated_delta_rule`.
        transpose_state_layout: See `chunk_gated_delta_rule`.

    Returns:
        o, final_state: See `chunk_gated_delta_rule`.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 4, 32)
        >>> g, beta, A_log = torch.randn(2, 1, 4, 64), torch.rand(2, 1, 4), torch.zeros(4)
        >>> o, state = torch_gdn.fused_recurrent_kda(
        ...     q, k, v, g, beta, A_log, output_final_state=True, use_gate_in_kernel=True, lower_bound=-5.0
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 4, 32]), torch.Size([2, 4, 64, 32]))
    """
    check_cu_seqlens("fused_recurrent_kda", cu_seqlens)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    layout = fla_arguments.layout_of_states(NAME, state_v_first, transpose_state_layout)
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping)
    if needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias):
        inputs = inputs_of_chunks(NAME, q, k, v, g, beta)
        options = Options(True, scale, *state, 64, use_gate_in_kernel, lower_bound, *betas, output_dtype, head_grouping)
        o, final_state, _ = delta_rule(inputs, initial_state, A_log, dt_bias, cu_seqlens, None, options)
    else:
        gate = (use_gate_in_kernel, A_log, dt_bias, lower_bound, *betas)
        o, final_state = torch.ops.gdn.fused_recurrent_kda(
            q, k, v, g, beta, scale, initial_state, *state, cu_seqlens, *gate, *more
        )
    return o, final_state if output_final_state else None


def fused_recurrent_kda_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Applies `fused_recurrent_kda` to a server's pool of states, in place. Use it for decoding.

    vLLM has a similar function (`ssm_state_indices`, `num_accepted_tokens`); its null index is 0.

    Args:
        q, k, v, g, beta: See `fused_recurrent_kda`.
        state_pool, state_indices, has_initial_state, null_index: See `fused_recurrent_gated_delta_rule_`.
        scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens: See `fused_recurrent_kda`.
        use_gate_in_kernel, A_log, dt_bias, lower_bound: See `fused_recurrent_kda`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, output_dtype, head_grouping: See `fused_recurrent_kda`.
        num_accepted_tokens, out: See `fused_recurrent_gated_delta_rule_`.

    Returns:
        o: See `fused_recurrent_kda`.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 4, 32)
        >>> g, beta, pool = -torch.rand(2, 1, 4, 64), torch.rand(2, 1, 4), torch.zeros(8, 4, 64, 32)
        >>> o = torch_gdn.fused_recurrent_kda_(q, k, v, g, beta, pool, torch.tensor([5, -1]))
        >>> o[1].any(), pool.flatten(1).any(1).nonzero().flatten()
        (tensor(False), tensor([5]))
    """
    check_cu_seqlens("fused_recurrent_kda_", cu_seqlens)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    gate = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping, num_accepted_tokens, out)
    o: Tensor = torch.ops.gdn.fused_recurrent_kda_(q, k, v, g, beta, *slots, *options, *gate, *more)
    return o if out is None else out
