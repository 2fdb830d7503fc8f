from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def chunk_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Carries the state S from chunk to chunk: v_new = u - w S, S <- exp(g_last) S + (k exp(g_last - g))^T v_new.

    FLA: `fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_h`, without its `gk`, `save_new_value` (v_new is
    always returned) and `cu_seqlens_cpu`.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        w: [B, T, HV, K], k's dtype. From `recompute_w_u`. HV is a multiple of H.
        u: [B, T, HV, V], k's dtype. From `recompute_w_u`. V is at most 512.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        initial_state: See `chunk_gated_delta_rule`.
        output_final_state: Whether to return the state after the last token. Default: False.
        chunk_size: 16, 32 or 64. Default: 64.
        state_v_first: Whether states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: See `chunk_gated_delta_rule`.
        chunk_indices: [NT, 2], int32 or int64. From `prepare_chunk_indices`. With it, a call with cu_seqlens on the
            device launches no surplus chunks. On the CPU or on the inputs' device. Not allowed without cu_seqlens.
            Default: None.

    Returns:
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), k's dtype. The state before each chunk. NT is
            ceil(T / chunk_size) without cu_seqlens, ceil(T / chunk_size) + N with cu_seqlens, or the length of
            chunk_indices. Rows without a chunk are 0.
        v_new: [B, T, HV, V], k's dtype.
        final_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), float32; None unless output_final_state.

    Example:
        >>> import torch, torch_gdn
        >>> k, w, u = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 64), torch.randn(1, 70, 4, 32)
        >>> h, v_new, final_state = torch_gdn.chunk_fwd_h(k, w, u)
        >>> h.shape, v_new.shape, final_state
        (torch.Size([1, 2, 4, 64, 32]), torch.Size([1, 70, 4, 32]), None)
    """
    check_cu_seqlens("chunk_fwd_h", cu_seqlens)
    if g is None:
        g = torch.zeros(u.shape[:3], dtype=torch.float32, device=u.device)
    h, v_new, final_state = torch.ops.gdn.chunk_fwd_h(
        k, w, u, g, initial_state, output_final_state, chunk_size, state_v_first, cu_seqlens, chunk_indices
    )
    return h, v_new, final_state if output_final_state else None


chunk_gated_delta_rule_fwd_h = chunk_fwd_h
