from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.delta_rule import Options, delta_rule, inputs_of_chunks
from torch_gdn.ops.arguments import check_cu_seqlens
from torch_gdn.ops.gdn import fla_arguments

NAME = "fused_recurrent_gated_delta_rule"


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Applies the gated delta rule token by token. Use it for decoding and short sequences.

    For each value head with state S in R^{K x V}, the rule for one token is

        S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule` of 0.6, with its arguments in its order. FLA lacks
    `output_dtype` and `head_grouping`.

    Args:
        q, k: See `chunk_gated_delta_rule`.
        v: [B, T, HV, V], bfloat16, float16 or float32. HV is a multiple of H. V is at most 512. Any strides; a last
            stride other than 1 costs a copy.
        g: See `chunk_gated_delta_rule`. Default: zeros.
        gk: [B, T, HV, K], any floating dtype. The log decay of each row of S, added to g. Default: zeros.
        gv: [B, T, HV, V], any floating dtype. The log decay of each column of S, added to g. Default: zeros.
        beta: [B, T, HV] or [B, T, HV, V], any floating dtype. The step size, for each head or for each column of S, or
            its logit with use_beta_sigmoid_in_kernel. Default: ones.
        scale, initial_state, output_final_state: See `chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel: Whether to normalise q and k first, as `l2norm` does but without rounding. Default:
            False.
        use_gate_in_kernel, A_log, dt_bias: See `chunk_gated_delta_rule`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: See `chunk_gated_delta_rule`.
        state_v_first, cu_seqlens, output_dtype, head_grouping: See `chunk_gated_delta_rule`.
        transpose_state_layout, head_first: See `chunk_gated_delta_rule`.

    Returns:
        o: [B, T, HV, V], output_dtype, or v's dtype.
        final_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), float32; None unless output_final_state.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 4, 32)
        >>> g, beta, state = -torch.rand(2, 1, 4), torch.rand(2, 1, 4), torch.randn(2, 4, 64, 32)
        >>> o, state = torch_gdn.fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 4, 32]), torch.Size([2, 4, 64, 32]))
    """
    check_cu_seqlens("fused_recurrent_gated_delta_rule", cu_seqlens)
    fla_arguments.refuse_head_first(NAME, head_first)
    layout = fla_arguments.layout_of_states(NAME, state_v_first, transpose_state_layout)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    more = (output_dtype, head_grouping)
    if needs_grad(q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias):
        inputs = inputs_of_chunks(NAME, q, k, v, g, beta, gk, gv)
        options = Options(False, scale, *state, 64, use_gate_in_kernel, None, *betas, output_dtype, head_grouping)
        o, final_state, _ = delta_rule(inputs, initial_state, A_log, dt_bias, cu_seqlens, None, options)
    else:
        gates = (gk, gv, use_gate_in_kernel, A_log, dt_bias, *betas)
        o, final_state = torch.ops.gdn.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, *state, cu_seqlens, *gates, *more
        )
    return o, final_state if output_final_state else None


def fused_recurrent_gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    *,
    scale: float | None = None,
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
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Applies `fused_recurrent_gated_delta_rule` to a server's pool of states, in place. Use it for decoding.

    vLLM and SGLang have similar functions (`ssm_state_indices`, `initial_state_indices`); their null indices are 0 and
    -1.

    Args:
        q, k, v, g, beta: See `fused_recurrent_gated_delta_rule`.
        state_pool: See `chunk_gated_delta_rule_`.
        state_indices: [N] or [N, tokens], int32 or int64. The slot of each sequence. No two sequences may have one
            slot. On the CPU or on q's device. For speculative decoding pass [N, tokens], the slot for the state after
            each token, with as many columns as a sequence can have tokens. A pool of 16 bits then rounds the state
            after every token. Default: sequence n has slot n.
        has_initial_state: See `chunk_gated_delta_rule_`.
        null_index: -1, or 0 as in vLLM. A sequence whose index is not above null_index has no slot. Its output is
            zeros, its tokens are not read, and no state is written. With [N, tokens], the column that a sequence starts
            from decides this: the first, or `num_accepted_tokens - 1`. A null index in another column means that the
            token is computed but the state after it is not kept. Default: -1.
        scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens: See `fused_recurrent_gated_delta_rule`.
        gk, gv, use_gate_in_kernel, A_log, dt_bias: See `fused_recurrent_gated_delta_rule`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: See `fused_recurrent_gated_delta_rule`.
        output_dtype, head_grouping: See `fused_recurrent_gated_delta_rule`.
        num_accepted_tokens: [N], int32 or int64. The number of tokens of the previous step that were accepted. A
            sequence continues from the slot in column `num_accepted_tokens - 1`. Requires state_indices [N, tokens]. On
            the CPU or on q's device. Default: all 1.
        out: See `chunk_gated_delta_rule_`.

    Returns:
        o: See `fused_recurrent_gated_delta_rule`.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 4, 32)
        >>> g, beta, pool = -torch.rand(2, 1, 4), torch.rand(2, 1, 4), torch.zeros(8, 4, 64, 32)
        >>> o = torch_gdn.fused_recurrent_gated_delta_rule_(q, k, v, g, beta, pool, torch.tensor([5, -1]))
        >>> o[1].any(), pool.flatten(1).any(1).nonzero().flatten()
        (tensor(False), tensor([5]))
    """
    check_cu_seqlens("fused_recurrent_gated_delta_rule_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    gates = (gk, gv, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o: Tensor = torch.ops.gdn.fused_recurrent_gated_delta_rule_(
        q, k, v, g, beta, *slots, *options, *gates, output_dtype, head_grouping, num_accepted_tokens, out
    )
    return o if out is None else out
