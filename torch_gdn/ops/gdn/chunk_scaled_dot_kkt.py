from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def chunk_scaled_dot_kkt(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    *,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes A[i, j] = beta_i (k_i . k_j) exp(g_i - g_j) for tokens i > j of one chunk; the rest of A is 0.

    FLA: `fla.ops.common.chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd`, without its `output_dtype`. In "Gated Delta
    Networks" (Yang, Kautz, Hatamizadeh, 2024) it is the strictly lower part that the WY form inverts.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. HV is a multiple of H. Default: zeros.
        beta: [B, T, HV], any floating dtype. Default: ones.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        A: [B, T, HV, chunk_size], float32. Columns past the end of a short chunk are 0.

    Example:
        >>> import torch, torch_gdn
        >>> k = torch.ones(1, 3, 1, 4)
        >>> torch_gdn.chunk_scaled_dot_kkt(k, chunk_size=16)[0, :, 0, :3]
        tensor([[0., 0., 0.],
                [4., 0., 0.],
                [4., 4., 0.]])
    """
    check_cu_seqlens("chunk_scaled_dot_kkt", cu_seqlens)
    if beta is None:
        beta = k.new_ones(k.shape[:3] if g is None else g.shape)
    if g is None:
        g = torch.zeros_like(beta, dtype=torch.float32)
    return torch.ops.gdn.chunk_scaled_dot_kkt(k, g, beta, cu_seqlens, chunk_size, chunk_indices)


chunk_scaled_dot_kkt_fwd = chunk_scaled_dot_kkt
