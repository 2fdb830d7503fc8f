from __future__ import annotations

import torch
from torch import Tensor


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
    *,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences, a chunk of tokens at a time: for prefill.

    For each value head, with its state S in R^{K x V}, token by token:

        S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    FLA: `fla.ops.gated_delta_rule.chunk_gated_delta_rule`; the algorithm is that of "Gated Delta Networks" (Yang,
    Kautz, Hatamizadeh, 2024). FLA's gate and sigmoid in the kernel (`use_gate_in_kernel`,
    `use_beta_sigmoid_in_kernel`, `allow_neg_eigval`), `cu_seqlens_cpu` and `cp_context` come in a later version.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256. Any strides; a last stride other than 1 costs
            a copy.
        v: [B, T, HV, V], dtype of q, V up to 512; HV is a multiple of H, and key head h serves the value heads from
            h * HV / H on.
        g: [B, T, HV], log decay (natural logarithm), any floating dtype; minus infinity is a reset.
        beta: [B, T, HV], step size, any floating dtype.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] float32 ([N, HV, V, K] with state_v_first), N being B or the number of packed
            sequences. Default: zeros.
        output_final_state: whether the state after the last token is returned. Default: False.
        use_qk_l2norm_in_kernel: normalise q and k first, as `l2norm`. Default: False.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on q's
            device. A sequence may be empty. Default: None.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`: with it, a call with cu_seqlens on the device launches no
            surplus chunks. Default: None.
        chunk_size: 16, 32 or 64; the result is the same but for rounding. Default: 64.

    Returns:
        o [B, T, HV, V], dtype of q, and the final state, float32 with the shape of initial_state, or None where it was
        not asked for.

    Raises:
        ValueError: a shape, head count, size, chunk_size, device or content of cu_seqlens that is not as above.
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
    o, final_state = torch.ops.gdn.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
        chunk_indices,
        chunk_size,
    )
    return o, final_state if output_final_state else None
