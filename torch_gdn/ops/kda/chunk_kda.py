from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens
from torch_gdn.ops.gdn import fla_arguments

NAME = "chunk_kda"
LOWEST_SAFE_BOUND = -5.0


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    transpose_state_layout: bool | None = None,
) -> tuple[Any, ...]:
    """Kimi Delta Attention over whole sequences, a chunk of tokens at a time: for prefill.

    FLA: `fla.ops.kda.chunk_kda`, its arguments in its order. Ours alone are `output_dtype` and `head_grouping`.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], bfloat16, float16 or float32, V up to 512; HV is a multiple of H. Where its dtype differs from
            q's, everything is computed in float32.
        g: [B, T, HV, K], log decay (natural logarithm), any floating dtype. Minus infinity is a reset; a value above
            0 makes the state grow and is not clamped. With use_gate_in_kernel, what it is made of.
        beta: [B, T, HV], the step size, any floating dtype; with use_beta_sigmoid_in_kernel its logit.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any floating dtype (one that is not float32
            is converted), N being B or the number of packed sequences. Default: zeros.
        output_final_state: whether the state after the last token is returned. Default: False.
        use_qk_l2norm_in_kernel: normalise q and k first, as `l2norm` without its rounding. Default: False.
        use_gate_in_kernel: take `fused_kda_gate(g, A_log, dt_bias, lower_bound)` for g. Default: False.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) for beta, in float32. Default: False.
        allow_neg_eigval: take 2 sigmoid(beta). Only with use_beta_sigmoid_in_kernel. Default: False.
        safe_gate: with use_gate_in_kernel, lower_bound must be from -5 to 0. FLA's kernel for such gates is another
            one; here there is no other effect. Default: False.
        lower_bound: of g, below 0; read with use_gate_in_kernel. Default: None, for the unbounded gate.
        disable_recompute: FLA's option of training; without effect. Default: False.
        return_intermediate_states: whether h is returned, which FLA does under torch.inference_mode() alone.
            Default: False.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty; [0] is no sequence, with T 0. Default: None.
        cu_seqlens_cpu: FLA's copy of cu_seqlens on the CPU; not needed here, and not read. Default: None.
        cp_context: None: there is one device. Default: None.
        use_graph, max_num_seqs: FLA's options of recorded graphs; without effect, as no call reads cu_seqlens on the
            host. Default: False, None.
        A_log: HV values of any shape, any floating dtype; read with use_gate_in_kernel, which needs it or lower_bound.
            Default: None.
        dt_bias: HV * K values of any shape, any floating dtype; read with use_gate_in_kernel. Default: None.
        chunk_size: 16, 32 or 64: of h; the result is the same but for rounding. Default: 64.
        output_dtype: dtype of o, that of q or float32. Default: that of q.
        head_grouping: as of `chunk_gated_delta_rule`. Default: "block".
        transpose_state_layout: FLA's old name of state_v_first; a DeprecationWarning. Default: None.

    Returns:
        o [B, T, HV, V], and the final state, float32 with the shape of initial_state, or None where it was not asked
        for. With return_intermediate_states also h [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), the state
        before each chunk, in q's dtype, or float32 where q is float16; NT as in `chunk_fwd_h`: of packed sequences h
        has FLA's rows, then rows of zeros.

    Raises:
        ValueError: a shape, head count, size, option, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 32)
        >>> g, beta = -20 * torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2)
        >>> o, state = torch_gdn.chunk_kda(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 64, 32]))
        >>> o, state, h = torch_gdn.chunk_kda(q, k, v, g, beta, return_intermediate_states=True)
        >>> h.shape, state, h[:, 0].any()
        (torch.Size([1, 2, 2, 64, 32]), None, tensor(False))
    """
    check_cu_seqlens("chunk_kda", cu_seqlens)
    fla_arguments.refuse_context_parallelism(NAME, cp_context)
    fla_arguments.check_cu_seqlens_cpu(NAME, cu_seqlens, cu_seqlens_cpu)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not LOWEST_SAFE_BOUND <= lower_bound < 0):
        raise ValueError(f"{NAME}: lower_bound: expected one from -5 to 0 where safe_gate is set, got {lower_bound}")
    layout = fla_arguments.layout_of_states(NAME, state_v_first, transpose_state_layout)
    state = (initial_state, output_final_state, use_qk_l2norm_in_kernel, layout)
    gates = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping, return_intermediate_states)
    o, final_state, h = torch.ops.gdn.chunk_kda(q, k, v, g, beta, scale, *state, cu_seqlens, chunk_size, *gates, *more)
    if not output_final_state:
        final_state = None
    return (o, final_state, h) if return_intermediate_states else (o, final_state)


def chunk_kda_(
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
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """`chunk_kda` on a server's pool of states, in place: for prefill.

    vLLM has the like (`ssm_state_indices`), where the null index is 0.

    Args:
        q, k, v, g, beta: as of `chunk_kda`.
        state_pool, state_indices, has_initial_state, null_index: as of `chunk_gated_delta_rule_`: the states of all
            slots, the slot of each sequence, and which sequences start from zeros.
        scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel: as of `chunk_kda`.
        allow_neg_eigval, lower_bound, A_log, dt_bias, state_v_first, cu_seqlens, chunk_size: as of `chunk_kda`.
        output_dtype, head_grouping: as for `chunk_kda`.
        return_intermediate_states: as for `chunk_gated_delta_rule_`.
        checkpoint_offsets, checkpoint_indices: as of `chunk_gated_delta_rule_`: after so many tokens of each sequence
            its state goes to a second slot too. Default: of none.
        out: [B, T, HV, V] in o's dtype, any strides but a last one of 1: o goes there, and is returned. Default: a
            new tensor.

    Returns:
        o [B, T, HV, V]; with return_intermediate_states, o and h.

    Raises:
        ValueError: a shape, head count, size, option, device or content that is not as above. Wrong indices on the
            device are not slots, and are reported at the next synchronisation.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 30, 2, 64), torch.randn(1, 30, 2, 64), torch.randn(1, 30, 4, 32)
        >>> g, beta, pool = -torch.rand(1, 30, 4, 64), torch.rand(1, 30, 4), torch.zeros(8, 4, 64, 32)
        >>> slots = torch.tensor([5, 2])
        >>> o = torch_gdn.chunk_kda_(q, k, v, g, beta, pool, slots, cu_seqlens=torch.tensor([0, 10, 30]))
        >>> o.shape, pool.flatten(1).any(1).nonzero().flatten()
        (torch.Size([1, 30, 4, 32]), tensor([2, 5]))
    """
    check_cu_seqlens("chunk_kda_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_size)
    gates = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping, return_intermediate_states, checkpoint_offsets, checkpoint_indices, out)
    o, h = torch.ops.gdn.chunk_kda_(q, k, v, g, beta, *slots, *options, *gates, *more)
    o = o if out is None else out
    return (o, h) if return_intermediate_states else o
