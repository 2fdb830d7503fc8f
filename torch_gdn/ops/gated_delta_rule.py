"""The gated delta rule: for prompts, for single tokens, and a whole layer's decoding step."""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.delta_rule import Options, delta_rule, inputs_of_chunks
from torch_gdn.ops import arguments

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_",
    "gdn_decode_",
]
CHUNK = "chunk_gated_delta_rule"
RECURRENT = "fused_recurrent_gated_delta_rule"


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
    arguments.check_cu_seqlens(CHUNK, cu_seqlens)
    arguments.refuse_head_first(CHUNK, head_first)
    arguments.refuse_context_parallelism(CHUNK, cp_context)
    arguments.check_cu_seqlens_cpu(CHUNK, cu_seqlens, cu_seqlens_cpu)
    layout = arguments.layout_of_states(CHUNK, state_v_first, transpose_state_layout)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more: Any = (output_dtype, head_grouping, return_intermediate_states)
    options = Options(False, scale, *state, chunk_size, use_gate_in_kernel, None, *betas, *more)
    return delta_rule((q, k, v, g, beta), initial_state, A_log, dt_bias, cu_seqlens, chunk_indices, options)


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
    arguments.check_cu_seqlens("chunk_gated_delta_rule_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, chunk_indices, chunk_size)
    gates = (use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    more = (return_intermediate_states, checkpoint_offsets, checkpoint_indices, out)
    o, h = torch.ops.gdn.chunk_gated_delta_rule_(
        q, k, v, g, beta, *slots, *options, *gates, output_dtype, head_grouping, *more
    )
    o = o if out is None else out
    return (o, h) if return_intermediate_states else o


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
    arguments.check_cu_seqlens(RECURRENT, cu_seqlens)
    arguments.refuse_head_first(RECURRENT, head_first)
    layout = arguments.layout_of_states(RECURRENT, state_v_first, transpose_state_layout)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    betas = (use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = (output_final_state, use_qk_l2norm_in_kernel, layout)
    more: Any = (output_dtype, head_grouping)
    if needs_grad(q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias):
        inputs = inputs_of_chunks(RECURRENT, q, k, v, g, beta, gk, gv)
        options = Options(False, scale, *state, 64, use_gate_in_kernel, None, *betas, *more)
        return delta_rule(inputs, initial_state, A_log, dt_bias, cu_seqlens, None, options)
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
    arguments.check_cu_seqlens("fused_recurrent_gated_delta_rule_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens)
    gates = (gk, gv, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o = torch.ops.gdn.fused_recurrent_gated_delta_rule_(
        q, k, v, g, beta, *slots, *options, *gates, output_dtype, head_grouping, num_accepted_tokens, out
    )
    return o if out is None else out


def gdn_decode_(
    qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    conv_weight: Tensor,
    conv_pool: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state_pool: Tensor,
    norm_weight: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    *,
    conv_bias: Tensor | None = None,
    activation: str | None = "silu",
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    norm_activation: str = "silu",
    norm_eps: float = 1e-6,
    round_norm: bool = False,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decodes a Gated DeltaNet layer between its projections, in place on both of its pools of states.

    It computes `causal_conv1d_update_`, then `fused_recurrent_gated_delta_rule_` with raw gates and normalised q and k,
    then `rms_norm_gated`. On `mps` this takes two launches, and the outputs of the rule are not rounded before the
    norm. Use it for a few tokens of each sequence. No other library has this function.

    Args:
        qkv: [B, T, D] ([B, T, D + HV * V] without z), bfloat16, float16 or float32. What the layer projects for q of
            all H key heads, then k, then v of all HV value heads: D is 2 * H * K + HV * V. Without z it is in
            Qwen3-Next's order: for each key head its q, its k, the v of its HV / H value heads, and their z.
        z: [B, T, HV * V], bfloat16, float16 or float32. The gate of the norm. None: it is in qkv.
        b: [B, T, HV] ([B, T, HV * 2] without a), any floating dtype. Beta is its sigmoid. Without a it has for each key
            head the b of its value heads, then their a.
        a: [B, T, HV], any floating dtype. The raw decays. None if and only if z is None: they are in b.
        conv_weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4.
        conv_pool: [slots, D, S], bfloat16, float16 or float32. The convolution's states, updated in place. S is at
            least W - 1; with num_accepted_tokens it is at least W - 2 plus the tokens of a step.
        A_log: [HV], any floating dtype.
        dt_bias: [HV], any floating dtype. None: zeros.
        state_pool: [slots, HV, K, V] ([slots, HV, V, K] with state_v_first), bfloat16, float16 or float32. Updated in
            place. K is at most 128 and V at most 192, so that one threadgroup has all columns of a head.
        norm_weight: [V], bfloat16, float16 or float32. Default: ones.
        state_indices: [N] or [N, tokens], int32 or int64. See `fused_recurrent_gated_delta_rule_`. With [N, tokens]
            the convolution's state is in the slot of the first column. N is B without cu_seqlens. Default: sequence n
            has slot n.
        has_initial_state: [N], bool. False: the sequence starts from zeros, whatever its slots hold. Default: all True.
        null_index: -1, or 0 as in vLLM. A sequence whose index is not above it has no slot: its output is zeros, its
            tokens are not read, and no state is written. Default: -1.
        conv_bias: [D], conv_weight's dtype. Default: None.
        activation: "silu" or "swish" of the convolution, or None. Default: "silu".
        allow_neg_eigval: Double beta. Default: False.
        state_v_first: The last two dimensions of the states are V and K. Default: False.
        norm_activation: "silu" (or "swish") or "sigmoid" of z. Default: "silu".
        norm_eps: Added to the mean of squares. Default: 1e-6.
        round_norm: See `rms_norm_gated`. Default: False.
        cu_seqlens: [N + 1], int32 or int64. Boundaries of sequences packed along T. Default: None.
        num_accepted_tokens: [N], int32 or int64. See `fused_recurrent_gated_delta_rule_` and `causal_conv1d_update_`.
            Default: None.
        out: [B, T, HV, V], qkv's dtype. Takes the result. Default: a new tensor.

    Returns:
        o: [B, T, HV, V], qkv's dtype. Zeros for a sequence without a slot.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

    Example:
        >>> import torch, torch_gdn
        >>> H, HV, K, V = 2, 4, 64, 32
        >>> D = 2 * H * K + HV * V
        >>> qkv, z, b, a = (torch.randn(3, 1, n) for n in (D, HV * V, HV, HV))
        >>> conv_pool, state_pool = torch.zeros(3, D, 4), torch.zeros(3, HV, K, V)
        >>> o = torch_gdn.gdn_decode_(qkv, z, b, a, torch.randn(D, 4), conv_pool, torch.zeros(HV), None, state_pool)
        >>> o.shape, bool(state_pool.flatten(1).any(1).all())
        (torch.Size([3, 1, 4, 32]), True)
    """
    arguments.check_cu_seqlens("gdn_decode_", cu_seqlens)
    projections, slots = (qkv, z, b, a), (state_indices, has_initial_state, null_index)
    parameters = (conv_weight, conv_pool, A_log, dt_bias, state_pool, norm_weight)
    options = (conv_bias, activation, allow_neg_eigval, state_v_first, norm_activation, norm_eps, round_norm)
    o = torch.ops.gdn.gdn_decode_(*projections, *parameters, *slots, *options, cu_seqlens, num_accepted_tokens, out)
    return o if out is None else out
