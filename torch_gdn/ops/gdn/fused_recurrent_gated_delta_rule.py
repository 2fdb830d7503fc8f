from __future__ import annotations

import torch
from torch import Tensor

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
    """The gated delta rule token by token, its state in registers: for decoding and short sequences.

    For each value head, with its state S in R^{K x V}:

        S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule` of 0.6, its arguments in its order. Ours alone are
    `output_dtype` and `head_grouping`.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], bfloat16, float16 or float32, V up to 512; HV is a multiple of H. Its dtype may be another
            than q's, as FLA's kernel takes it.
        g: [B, T, HV], log decay (natural logarithm), any floating dtype. Minus infinity is a reset; a value above 0
            makes the state grow and is not clamped. With use_gate_in_kernel, what it is made of. Default: zeros.
        gk: [B, T, HV, K], log decay of each row of S, on top of g; any floating dtype. Default: zeros.
        gv: [B, T, HV, V], log decay of each column of S, on top of g; any floating dtype. Default: zeros.
        beta: [B, T, HV], step size, or [B, T, HV, V], one for each column of S; any floating dtype. With
            use_beta_sigmoid_in_kernel, its logit. Default: ones.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any floating dtype (one that is not float32
            is converted), N being B or the number of packed sequences. Default: zeros.
        output_final_state: whether the state after the last token is returned. Default: False.
        use_qk_l2norm_in_kernel: normalise q and k first, as `l2norm` without its rounding. Default: False.
        use_gate_in_kernel: take -exp(A_log) softplus(g + dt_bias) for g, in float32. Default: False.
        A_log, dt_bias: [HV], any floating dtype; read with use_gate_in_kernel, which needs A_log. Default: None.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) for beta, in float32. Default: False.
        allow_neg_eigval: take 2 sigmoid(beta). Only with use_beta_sigmoid_in_kernel. Default: False.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty; [0] is no sequence, with T 0. Default: None.
        output_dtype: dtype of o, that of v or float32 (what a float16 model reads out can pass 65,504). Default: that
            of v.
        head_grouping: "block": key head h serves the value heads from h * HV / H on. "tiled": it serves the value
            heads h, h + H, h + 2 H, as weights in GGUF files have it. Default: "block".
        transpose_state_layout: FLA's old name of state_v_first; a DeprecationWarning. Default: None.
        head_first: FLA's old layout [B, H, T, ...]: an error if True, a DeprecationWarning if False. Default: None.

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
    state = (initial_state, output_final_state, use_qk_l2norm_in_kernel, layout, cu_seqlens)
    gates = (gk, gv, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, final_state = torch.ops.gdn.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, scale, *state, *gates, output_dtype, head_grouping
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
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_recurrent_gated_delta_rule` on a server's pool of states, in place: for decoding, without a copy of them.

    vLLM and SGLang have the like (`ssm_state_indices`, `initial_state_indices`), where the null index is 0 and -1.

    Args:
        q, k, v, g, beta: as of `fused_recurrent_gated_delta_rule`.
        state_pool: [slots, HV, K, V] ([slots, HV, V, K] with state_v_first), bfloat16, float16 or float32, any strides:
            the state of each sequence, read and written in place. Computed in float32.
        state_indices: [N] int32 or int64, the slot of each sequence, on the CPU or on q's device; no slot twice.
            Default: sequence n has slot n. For speculative decoding [N, tokens]: the slot for the state after each
            token, as many columns as a sequence can have tokens. In a pool of 16 bits the state is then rounded after
            every token.
        has_initial_state: [N] bool on q's device; a sequence with False starts from zeros whatever its slot holds.
            Default: all True.
        null_index: an index up to this one is no slot: -1, or 0 (vLLM's rule). A sequence without a slot has outputs of
            zeros; its tokens are not read and no state is written. With [N, tokens] the column that a sequence starts
            from decides this: the first, or `num_accepted_tokens - 1`. In any other column a null index means that the
            token is computed and the state after it is not kept. Default: -1.
        gk, gv, scale, use_qk_l2norm_in_kernel: as of `fused_recurrent_gated_delta_rule`.
        use_gate_in_kernel, A_log, dt_bias: as of `fused_recurrent_gated_delta_rule`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: as of `fused_recurrent_gated_delta_rule`.
        state_v_first, cu_seqlens, output_dtype, head_grouping: as of `fused_recurrent_gated_delta_rule`.
        num_accepted_tokens: [N] int32 or int64, on the CPU or on q's device, with state_indices [N, tokens]: how many
            tokens of the step before were accepted; a sequence goes on from the slot in column
            `num_accepted_tokens - 1`. Default: 1 of each.
        out: [B, T, HV, V] in o's dtype, any strides but a last one of 1: o goes there, as into a part of a buffer for
            several calls, and is returned. Default: a new tensor.

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
