"""Kimi Delta Attention: for prompts, for single tokens, and its gate."""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.delta_rule import Options, delta_rule, inputs_of_chunks
from torch_gdn.autograd.layers import KdaGate
from torch_gdn.ops import arguments

__all__ = [
    "chunk_kda",
    "chunk_kda_",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "fused_recurrent_kda_",
]
CHUNK = "chunk_kda"
RECURRENT = "fused_recurrent_kda"
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
    """Applies Kimi Delta Attention to whole sequences, one chunk of tokens at a time. Use it for prefill.

    `fused_recurrent_kda` has the formula. FLA: `fla.ops.kda.chunk_kda`, with its arguments in its order. FLA lacks
    `output_dtype` and `head_grouping`.

    Args:
        q, k, v: See `chunk_gated_delta_rule`.
        g: See `fused_recurrent_kda`.
        beta, scale, initial_state, output_final_state: See `chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel: See `fused_recurrent_gated_delta_rule`.
        use_gate_in_kernel: See `fused_recurrent_kda`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: See `chunk_gated_delta_rule`.
        safe_gate: Whether lower_bound must be at least -5, with use_gate_in_kernel. FLA has another kernel for such
            gates; here nothing else changes. Default: False.
        lower_bound: See `fused_recurrent_kda`.
        disable_recompute: FLA's option for training. It has no effect. Default: False.
        return_intermediate_states: Whether to return h, which FLA does under torch.inference_mode() only. Default:
            False.
        state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context: See `chunk_gated_delta_rule`.
        use_graph: FLA's option for recorded graphs. It has no effect, because no call reads cu_seqlens on the host.
            Default: False.
        max_num_seqs: FLA's option for recorded graphs. It has no effect. Default: None.
        A_log, dt_bias: See `fused_recurrent_kda`.
        chunk_size: 16, 32 or 64. The chunk size of h; it changes other results by rounding only. Default: 64.
        output_dtype, head_grouping, transpose_state_layout: See `chunk_gated_delta_rule`.

    Returns:
        o, final_state: See `chunk_gated_delta_rule`.
        h: See `chunk_gated_delta_rule`. For packed sequences, h has FLA's rows and then rows of zeros.

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
    arguments.check_cu_seqlens(CHUNK, cu_seqlens)
    arguments.refuse_context_parallelism(CHUNK, cp_context)
    arguments.check_cu_seqlens_cpu(CHUNK, cu_seqlens, cu_seqlens_cpu)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not LOWEST_SAFE_BOUND <= lower_bound < 0):
        raise ValueError(
            f"{CHUNK}: lower_bound: expected a number from -5 to 0 when safe_gate is set, got {lower_bound}"
        )
    layout = arguments.layout_of_states(CHUNK, state_v_first, transpose_state_layout)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more: Any = (output_dtype, head_grouping, return_intermediate_states)
    options = Options(True, scale, *state, chunk_size, use_gate_in_kernel, lower_bound, *betas, *more)
    return delta_rule((q, k, v, g, beta), initial_state, A_log, dt_bias, cu_seqlens, None, options)


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
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Applies `chunk_kda` to a server's pool of states, in place. Use it for prefill.

    vLLM has a similar function (`ssm_state_indices`); its null index is 0.

    Args:
        q, k, v, g, beta: See `chunk_kda`.
        state_pool, state_indices, has_initial_state, null_index: See `chunk_gated_delta_rule_`.
        scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_size: See `chunk_kda`.
        use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel: See `chunk_kda`.
        allow_neg_eigval, output_dtype, head_grouping, return_intermediate_states: See `chunk_kda`.
        checkpoint_offsets, checkpoint_indices, out: See `chunk_gated_delta_rule_`.

    Returns:
        o, h: See `chunk_kda`.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 30, 2, 64), torch.randn(1, 30, 2, 64), torch.randn(1, 30, 4, 32)
        >>> g, beta, pool = -torch.rand(1, 30, 4, 64), torch.rand(1, 30, 4), torch.zeros(8, 4, 64, 32)
        >>> slots = torch.tensor([5, 2])
        >>> o = torch_gdn.chunk_kda_(q, k, v, g, beta, pool, slots, cu_seqlens=torch.tensor([0, 10, 30]))
        >>> o.shape, pool.flatten(1).any(1).nonzero().flatten()
        (torch.Size([1, 30, 4, 32]), tensor([2, 5]))
    """
    arguments.check_cu_seqlens("chunk_kda_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_size)
    gates = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping, return_intermediate_states, checkpoint_offsets, checkpoint_indices, out)
    o, h = torch.ops.gdn.chunk_kda_(q, k, v, g, beta, *slots, *options, *gates, *more)
    o = o if out is None else out
    return (o, h) if return_intermediate_states else o


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
    arguments.check_cu_seqlens(RECURRENT, cu_seqlens)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    layout = arguments.layout_of_states(RECURRENT, state_v_first, transpose_state_layout)
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more: Any = (output_dtype, head_grouping)
    if needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias):
        inputs = inputs_of_chunks(RECURRENT, q, k, v, g, beta)
        options = Options(True, scale, *state, 64, use_gate_in_kernel, lower_bound, *betas, *more)
        return delta_rule(inputs, initial_state, A_log, dt_bias, cu_seqlens, None, options)
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
    arguments.check_cu_seqlens("fused_recurrent_kda_", cu_seqlens)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    gate = (use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (output_dtype, head_grouping, num_accepted_tokens, out)
    o = torch.ops.gdn.fused_recurrent_kda_(q, k, v, g, beta, *slots, *options, *gate, *more)
    return o if out is None else out


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the log decay of each key channel from its projection: -exp(A_log) softplus(g + dt_bias).

    With lower_bound it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), which stays between lower_bound and 0.

    FLA: `fla.ops.kda.gate.fused_kda_gate`. With use_gate_in_kernel, the ops compute the same themselves.

    Args:
        g: [..., HV, K], any floating dtype. Any strides.
        A_log: HV elements in any shape, any floating dtype. Default: zeros.
        dt_bias: HV * K elements in any shape, any floating dtype. Default: zeros.
        lower_bound: A number below 0. Default: None, for the unbounded gate.
        output_dtype: Dtype of the result: bfloat16, float16 or float32. The arithmetic is in float32. Default: None,
            for float32.

    Returns:
        y: g's shape, output_dtype, or float32. Contiguous. A value depends neither on the others nor on its place in
            the tensor.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_kda_gate(torch.zeros(1, 2), torch.zeros(1), torch.tensor([0.0, 1.0]))
        tensor([[-0.6931, -1.3133]])
        >>> torch_gdn.fused_kda_gate(torch.tensor([[-30.0, 0.0, 30.0]]), lower_bound=-5.0)
        tensor([[-4.6788e-13, -2.5000e+00, -5.0000e+00]])
    """
    gate = KdaGate.apply if needs_grad(g, A_log, dt_bias) else torch.ops.gdn.fused_kda_gate
    return gate(g, A_log, dt_bias, lower_bound, output_dtype)
