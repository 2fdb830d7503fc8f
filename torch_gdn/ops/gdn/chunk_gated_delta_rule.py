from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.delta_rule import Options, delta_rule
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
    """Applies the gated delta rule to whole sequences, one chunk of tokens at a time. Use it for prefill.

    For each value head with state S in R^{K x V}, the rule for one token is

        S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of 0.6, with its arguments in its order. The algorithm is
    that of "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024). FLA lacks `output_dtype`, `head_grouping` and
    `return_intermediate_states` (which it has for Kimi Delta Attention).

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32. K is at most 256. Any strides; a last stride other than 1 costs a
            copy.
        k: q's shape and dtype. Any strides; a last stride other than 1 costs a copy.
        v: [B, T, HV, V], bfloat16, float16 or float32. HV is a multiple of H. V is at most 512. If v's dtype is not
            q's, everything is computed in float32. Any strides; a last stride other than 1 costs a copy.
        g: [B, T, HV], any floating dtype. The log decay (natural logarithm), or the raw gate with use_gate_in_kernel.
            Minus infinity resets the state. A value above 0 makes the state grow and is not clamped.
        beta: [B, T, HV], any floating dtype. The step size, or its logit with use_beta_sigmoid_in_kernel.
        scale: Factor of o. Default: K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any floating dtype. Converted to float32.
            Default: zeros.
        output_final_state: Whether to return the state after the last token. Default: False.
        use_qk_l2norm_in_kernel: Whether to apply `l2norm` to q and k first. Default: False.
        use_beta_sigmoid_in_kernel: Whether to use sigmoid(beta) as beta, in float32. Default: False.
        allow_neg_eigval: Whether to use 2 sigmoid(beta) as beta. Requires use_beta_sigmoid_in_kernel. Default: False.
        state_v_first: Whether states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N sequences packed along T; B must be 1. N is B without
            cu_seqlens. A sequence may be empty. Pass [0] for no sequences, with T = 0. On the CPU or on the inputs'
            device. Default: None.
        cu_seqlens_cpu: [N + 1], int32 or int64. FLA's copy of cu_seqlens on the CPU. It is not read. Default: None.
        chunk_indices: See `chunk_fwd_h`.
        cp_context: FLA's context parallelism, which is not supported. Must be None.
        chunk_size: 16, 32 or 64. It changes results by rounding only. On `mps` it applies to h and to the chunked
            algorithm (`python -m torch_gdn tune`). Default: 64.
        use_gate_in_kernel: Whether to use -exp(A_log) softplus(g + dt_bias) as g, in float32. Default: False.
        A_log: [HV], any floating dtype. Read only with use_gate_in_kernel, which requires it. Default: None.
        dt_bias: [HV], any floating dtype. Read only with use_gate_in_kernel. Default: zeros.
        output_dtype: Dtype of o: v's dtype or float32. The output of a float16 model can exceed 65,504. Default: None,
            for v's dtype.
        head_grouping: "block": key head h serves HV / H value heads, starting with h * HV / H. "tiled": it serves the
            value heads h, h + H, h + 2 H and so on, as in GGUF files. Default: "block".
        return_intermediate_states: Whether to return h. Default: False.
        transpose_state_layout: FLA's deprecated name of state_v_first. It emits a DeprecationWarning. Default: None.
        head_first: FLA's deprecated layout [B, H, T, ...]. True is an error, False emits a DeprecationWarning. Default:
            None.

    Returns:
        o: [B, T, HV, V], output_dtype, or v's dtype.
        final_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), float32; None unless output_final_state.
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), bfloat16 if q and v are bfloat16, else float32;
            only with return_intermediate_states. The state before each chunk. `chunk_fwd_h` defines NT.

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
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    more = (output_dtype, head_grouping, return_intermediate_states)
    if needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias):
        options = Options(False, scale, *state, chunk_size, use_gate_in_kernel, None, *betas, output_dtype)
        options = options._replace(head_grouping=head_grouping, return_intermediate_states=return_intermediate_states)
        tensors = (initial_state, A_log, dt_bias, cu_seqlens, chunk_indices)
        o, final_state, h = delta_rule((q, k, v, g, beta), *tensors, options)
    else:
        chunks = (cu_seqlens, chunk_indices, chunk_size)
        gates = (use_gate_in_kernel, A_log, dt_bias, *betas)
        o, final_state, h = torch.ops.gdn.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, *state, *chunks, *gates, *more
        )
    state_or_none = final_state if output_final_state else None
    return (o, state_or_none, h) if return_intermediate_states else (o, state_or_none)


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
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Applies `chunk_gated_delta_rule` to a server's pool of states, in place. Use it for prefill.

    vLLM and SGLang have similar functions (`ssm_state_indices`, `initial_state_indices`); their null indices are 0 and
    -1.

    Args:
        q, k, v, g, beta: See `chunk_gated_delta_rule`.
        state_pool: [slots, HV, K, V] ([slots, HV, V, K] with state_v_first), bfloat16, float16 or float32. The states,
            read and written in place. They are computed in float32. Any strides.
        state_indices: [N], int32 or int64. The slot of each sequence. No two sequences may have one slot. On the CPU or
            on q's device. Default: sequence n has slot n.
        has_initial_state: [N], bool. Pass False for a new request; its state then starts from zeros. On q's device.
            Default: all True.
        null_index: -1, or 0 as in vLLM. A sequence whose index is not above null_index has no slot, and its output is
            zeros. Default: -1.
        scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens: See `chunk_gated_delta_rule`.
        chunk_indices, chunk_size, use_gate_in_kernel, A_log, dt_bias: See `chunk_gated_delta_rule`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, output_dtype, head_grouping: See `chunk_gated_delta_rule`.
        return_intermediate_states: See `chunk_gated_delta_rule`. h is zeros for a sequence without a slot.
        checkpoint_offsets: [N], int32 or int64. Store the state after this many tokens of each sequence in a second
            slot too, as vLLM's prefill checkpoints. It has the bits of a prefill that ends there by the same algorithm.
            Pass a multiple of 64 up to the sequence's tokens, or 0 to store no checkpoint for it. On the CPU or on q's
            device. Default: None.
        checkpoint_indices: [N], int32 or int64. The slot of each checkpoint, which no other sequence or checkpoint may
            have. An index that is not above null_index stores no checkpoint. On the CPU or on q's device. Required with
            checkpoint_offsets. Default: None.
        out: [B, T, HV, V], o's dtype. The function writes o here and returns it; several calls can fill parts of one
            buffer. The last stride must be 1. Default: a new tensor.

    Returns:
        o: See `chunk_gated_delta_rule`.
        h: See `chunk_gated_delta_rule`.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

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
