from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens
from torch_gdn.ops.gdn import fla_arguments

NAME = "chunk_gated_delta_rule"


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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
) -> tuple[Any, ...]:
    """The gated delta rule over whole sequences, a chunk of tokens at a time: for prefill.

    For each value head, with its state S in R^{K x V}, token by token:

        S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of 0.6, its arguments in its order; the algorithm is that of
    "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024). Ours alone are `output_dtype`, `head_grouping` and
    `return_intermediate_states` (which FLA has for Kimi Delta Attention).

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], bfloat16, float16 or float32, V up to 512; HV is a multiple of H. Where its dtype is another
            than q's, everything is computed in float32.
        g: [B, T, HV], log decay (natural logarithm), any floating dtype. Minus infinity is a reset; a value above 0
            makes the state grow and is not clamped. With use_gate_in_kernel, the raw gate.
        beta: [B, T, HV], the step size, any floating dtype; with use_beta_sigmoid_in_kernel its logit.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any floating dtype (one that is not float32
            is converted), N being B or the number of packed sequences. Default: zeros.
        output_final_state: whether the state after the last token is returned. Default: False.
        use_qk_l2norm_in_kernel: normalise q and k first, as `l2norm`. Default: False.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) for beta, in float32. Default: False.
        allow_neg_eigval: take 2 sigmoid(beta). Only with use_beta_sigmoid_in_kernel. Default: False.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty; [0] is no sequence, with T 0. Default: None.
        cu_seqlens_cpu: FLA's copy of cu_seqlens on the CPU; not needed here, and not read. Default: None.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`: with it, a call with cu_seqlens on the device launches no
            surplus chunks. Default: None.
        cp_context: FLA's context parallelism, which is not here: None.
        chunk_size: 16, 32 or 64; the result is the same but for rounding. On `mps` it is that of h and of
            the chunked algorithm (`torch_gdn.tune`). Default: 64.
        use_gate_in_kernel: take -exp(A_log) softplus(g + dt_bias) for g, in float32. Default: False.
        A_log, dt_bias: [HV], any floating dtype; read with use_gate_in_kernel, which needs A_log. Default: None.
        output_dtype: dtype of o, that of q or float32 (what a float16 model reads out can pass 65,504). Default: that
            of q.
        head_grouping: "block": key head h serves the value heads from h * HV / H on. "tiled": it serves the value
            heads h, h + H, h + 2 H, as weights in GGUF files have it. Default: "block".
        return_intermediate_states: whether h is returned. Default: False.
        transpose_state_layout: FLA's old name of state_v_first; a DeprecationWarning. Default: None.
        head_first: FLA's old layout [B, H, T, ...]: an error if True, a DeprecationWarning if False. Default: None.

    Returns:
        o [B, T, HV, V], and the final state, float32 with the shape of initial_state, or None where it was not asked
        for. With return_intermediate_states also h [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), the state
        before each chunk, in q's dtype, or float32 where q is float16; NT as in `chunk_fwd_h`.

    Raises:
        ValueError: a shape, head count, size, option, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 4, 32)
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, final_state = torch_gdn.chunk_gated_delta_rule(
        ...     q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        ... )
        >>> o.shape, final_state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 64, 32]))
    """
    check_cu_seqlens("chunk_gated_delta_rule", cu_seqlens)
    fla_arguments.refuse_head_first(NAME, head_first)
    fla_arguments.refuse_context_parallelism(NAME, cp_context)
    fla_arguments.check_cu_seqlens_cpu(NAME, cu_seqlens, cu_seqlens_cpu)
    layout = fla_arguments.layout_of_states(NAME, state_v_first, transpose_state_layout)
    state = (initial_state, output_final_state, use_qk_l2norm_in_kernel, layout)
    chunks = (cu_seqlens, chunk_indices, chunk_size)
    gates = (use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, final_state, h = torch.ops.gdn.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, *state, *chunks, *gates, output_dtype, head_grouping, return_intermediate_states
    )
    if not output_final_state:
        final_state = None
    return (o, final_state, h) if return_intermediate_states else (o, final_state)


def chunk_gated_delta_rule_(
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """`chunk_gated_delta_rule` on a server's pool of states, in place: for prefill.

    vLLM and SGLang have the like (`ssm_state_indices`, `initial_state_indices`), where the null index is 0 and -1.

    Args:
        q, k, v, g, beta: as of `chunk_gated_delta_rule`.
        state_pool: [slots, HV, K, V] ([slots, HV, V, K] with state_v_first), bfloat16, float16 or float32, any strides:
            the state of each sequence, read and written in place. Computed in float32.
        state_indices: [N] int32 or int64, the slot of each sequence, on the CPU or on q's device; no slot twice.
            Default: sequence n has slot n.
        has_initial_state: [N] bool; a sequence with False starts from zeros whatever its slot holds. Default: all True.
        null_index: an index up to this one is no slot: -1, or 0 (vLLM's rule). The output of such a sequence is zeros.
            Default: -1.
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: as of `chunk_gated_delta_rule`.
        state_v_first, cu_seqlens, chunk_indices, chunk_size: as of `chunk_gated_delta_rule`.
        use_gate_in_kernel, A_log, dt_bias, output_dtype, head_grouping: as of `chunk_gated_delta_rule`.
        return_intermediate_states: as of `chunk_gated_delta_rule`; of a sequence without a slot, zeros.
        checkpoint_offsets: [N] int32 or int64, on the CPU or on q's device: after so many tokens of each sequence, a
            multiple of 64 up to all of them, its state goes to a second slot too, with the bits of a prefill that ends
            there by the same algorithm. 0: of this one not. vLLM's prefill checkpoints. Default: of none.
        checkpoint_indices: [N] int32 or int64, on the CPU or on q's device: that slot, which is no other's; up to
            null_index none. Given with checkpoint_offsets. Default: None.
        out: [B, T, HV, V] in o's dtype, any strides but a last one of 1: o goes there, as into a part of a buffer for
            several calls, and is returned. Default: a new tensor.

    Returns:
        o [B, T, HV, V]; with return_intermediate_states o and h.

    Raises:
        ValueError: a shape, head count, size, option, device or content that is not as above. Wrong indices on the
            device are not slots, and are reported at the next synchronisation.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 30, 2, 64), torch.randn(1, 30, 2, 64), torch.randn(1, 30, 4, 32)
        >>> g, beta, pool = -torch.rand(1, 30, 4), torch.rand(1, 30, 4), torch.zeros(8, 4, 64, 32)
        >>> slots = torch.tensor([5, 2])
        >>> o = torch_gdn.chunk_gated_delta_rule_(q, k, v, g, beta, pool, slots, cu_seqlens=torch.tensor([0, 10, 30]))
        >>> o.shape, pool.flatten(1).any(1).nonzero().flatten()
        (torch.Size([1, 30, 4, 32]), tensor([2, 5]))
    """
    check_cu_seqlens("chunk_gated_delta_rule_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_indices, chunk_size)
    gates = (use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (return_intermediate_states, checkpoint_offsets, checkpoint_indices, out)
    o, h = torch.ops.gdn.chunk_gated_delta_rule_(
        q, k, v, g, beta, *slots, *options, *gates, output_dtype, head_grouping, *more
    )
    o = o if out is None else out
    return (o, h) if return_intermediate_states else o
