from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes the output of each chunk: o = scale ((q exp(g)) h + tril(q k^T exp(g_i - g_j)) v).

    FLA: `fla.ops.common.chunk_o.chunk_fwd_o`, without its `g_gamma`.

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        k: q's shape and dtype.
        v: [B, T, HV, V], q's dtype. v_new from `chunk_fwd_h`. HV is a multiple of H. V is at most 512.
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), q's dtype. From `chunk_fwd_h` with the same
            cu_seqlens and chunk_indices.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        scale: Factor of o. Default: K ** -0.5.
        state_v_first: Whether states are [V, K] instead of [K, V]. Default: False.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        o: [B, T, HV, V], q's dtype.

    Example:
        >>> import torch, torch_gdn
        >>> q, k, v = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32)
        >>> torch_gdn.chunk_fwd_o(q, k, v, h=torch.zeros(1, 2, 4, 64, 32)).shape
        torch.Size([1, 70, 4, 32])
    """
    check_cu_seqlens("chunk_fwd_o", cu_seqlens)
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    return torch.ops.gdn.chunk_fwd_o(q, k, v, h, g, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices)
