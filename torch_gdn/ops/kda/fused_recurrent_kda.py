from __future__ import annotations

import torch
from torch import Tensor

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
    """Kimi Delta Attention token by token: the gated delta rule with a decay for each key channel.

    For each value head, with its state S in R^{K x V}:

        S <- diag(exp(g)) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.kda.fused_recurrent_kda`, its arguments in its order. Ours alone are `output_dtype` and
    `head_grouping`. On `mps` the gate is in the kernel, on the CPU it is computed before.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], bfloat16, float16 or float32, V up to 512; HV is a multiple of H.
        g: [B, T, HV, K], log decay (natural logarithm), any floating dtype. Minus infinity is a reset; a value above
            0 makes the state grow and is not clamped. With use_gate_in_kernel, what it is made of.
        beta: [B, T, HV], step size, or [B, T, HV, V], one for each column of S; any floating dtype. With
            use_beta_sigmoid_in_kernel, its logit.
        A_log: HV values, any floating dtype; read with use_gate_in_kernel, which needs it or lower_bound. Default:
            None.
        dt_bias: HV * K values, any floating dtype; read with use_gate_in_kernel. Default: None.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any floating dtype (one that is not float32
            is converted), N being B or the number of packed sequences. Default: zeros.
        output_final_state: whether the state after the last token is returned. Default: False.
        use_qk_l2norm_in_kernel: normalise q and k first, as `l2norm` without its rounding. Default: False.
        use_gate_in_kernel: take `fused_kda_gate(g, A_log, dt_bias, lower_bound)` for g. Default: False.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) for beta, in float32. Default: False.
        allow_neg_eigval: take 2 sigmoid(beta). Only with use_beta_sigmoid_in_kernel. Default: False.
        lower_bound: of g, below 0; read with use_gate_in_kernel. Default: None, for the unbounded gate.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty; [0] is no sequence, with T 0. Default: None.
        output_dtype: dtype of o, that of v or float32. Default: that of v.
        head_grouping: as of `fused_recurrent_gated_delta_rule`. Default: "block".
        transpose_state_layout: FLA's old name of state_v_first; a DeprecationWarning. Default: None.

    Returns:
        o [B, T, HV, V], and the final state, float32 with the shape of initial_state, or None where it was not asked
        for.

    Raises:
        ValueError: a shape, head count, size, option, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
    state = (initial_state, output_final_state, use_qk_l2norm_in_kernel, layout, cu_seqlens)
    gate = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping)
    o, final_state = torch.ops.gdn.fused_recurrent_kda(q, k, v, g, beta, scale, *state, *gate, *more)
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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_recurrent_kda` on a server's pool of states, in place: for decoding.

    vLLM has the like (`ssm_state_indices`, `num_accepted_tokens`), where the null index is 0.

    Args:
        q, k, v, g, beta: as of `fused_recurrent_kda`.
        state_pool, state_indices, has_initial_state: as of `fused_recurrent_gated_delta_rule_`: the states of all
            slots, the slot of each sequence or of each token, and which sequences start from zeros.
        null_index: as of `fused_recurrent_gated_delta_rule_`. Default: -1.
        A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel: as of `fused_recurrent_kda`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound: as of `fused_recurrent_kda`.
        state_v_first, cu_seqlens, output_dtype, head_grouping: as of `fused_recurrent_kda`.
        num_accepted_tokens: [N] int32 or int64, with state_indices [N, tokens]: how many tokens of the step before
            were accepted; a sequence goes on from the slot in column `num_accepted_tokens - 1`. Default: 1 of each.
        out: [B, T, HV, V] in o's dtype, any strides but a last one of 1: o goes there, and is returned. Default: a
            new tensor.

    Returns:
        o [B, T, HV, V].

    Raises:
        ValueError: a shape, head count, size, option, device or content that is not as above. Wrong indices on the
            device are not slots, and are reported at the next synchronisation.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
