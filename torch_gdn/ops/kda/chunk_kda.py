from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.gdn import fla_arguments
from torch_gdn.ops.gdn.fused_recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule
from torch_gdn.ops.kda.log_decays import log_decays

NAME = "chunk_kda"
CHUNK_SIZES = (32, 64)
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
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences: for prefill, with the results of `fused_recurrent_kda`.

    FLA: `fla.ops.kda.chunk_kda`, its arguments in its order. Ours alone are `output_dtype` and `head_grouping`.

    Limit: there is no chunked kernel yet. On every device the recurrent kernel goes through the sequence token by
    token, in one launch: exact for any decay, and parallel over heads and columns of V alone.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], dtype of q, V up to 512; HV is a multiple of H.
        g: [B, T, HV, K], log decay (natural logarithm), any floating dtype; minus infinity is a reset. With
            use_gate_in_kernel, what it is made of.
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
        return_intermediate_states: False: the states between chunks are not there. Default: False.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty. Default: None.
        cu_seqlens_cpu: FLA's copy of cu_seqlens on the CPU; not needed here, and not read. Default: None.
        cp_context: None: there is one device. Default: None.
        use_graph, max_num_seqs: FLA's options of recorded graphs; without effect, as no call reads cu_seqlens on the
            host. Default: False, None.
        A_log: HV values, any floating dtype; read with use_gate_in_kernel, which needs it or lower_bound. Default:
            None.
        dt_bias: HV * K values, any floating dtype; read with use_gate_in_kernel. Default: None.
        chunk_size: 32 or 64; without effect on the result. Default: 64.
        output_dtype: dtype of o, that of q or float32. Default: that of q.
        head_grouping: as of `chunk_gated_delta_rule`. Default: "block".
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
        >>> q, k, v = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 32)
        >>> g, beta = -20 * torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2)
        >>> o, state = torch_gdn.chunk_kda(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 64, 32]))
    """
    fla_arguments.refuse_context_parallelism(NAME, cp_context)
    fla_arguments.check_cu_seqlens_cpu(NAME, cu_seqlens, cu_seqlens_cpu)
    if return_intermediate_states:
        raise ValueError(f"{NAME}: return_intermediate_states: expected False (there is no chunked kernel), got True")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{NAME}: chunk_size: expected 32 or 64, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not LOWEST_SAFE_BOUND <= lower_bound < 0):
        raise ValueError(f"{NAME}: lower_bound: expected one from -5 to 0 where safe_gate is set, got {lower_bound}")
    if v.dtype != q.dtype:
        raise TypeError(f"{NAME}: v: expected {str(q.dtype)[6:]} like q, got {str(v.dtype)[6:]}")
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        gk=log_decays(NAME, q, v, g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=fla_arguments.layout_of_states(NAME, state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
        output_dtype=output_dtype,
        head_grouping=head_grouping,
    )
