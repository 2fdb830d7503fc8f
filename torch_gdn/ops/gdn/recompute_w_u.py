from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the WY form of each chunk's updates: w = A (beta k exp(g)) and u = A (beta v).

    FLA: `fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd`.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32. K is at most 256.
        v: [B, T, HV, V], k's dtype. HV is a multiple of H. V is at most 512.
        beta: [B, T, HV], any floating dtype.
        A: [B, T, HV, C], float32. The inverse from `solve_tril`.
        g: [B, T, HV], float32. The cumulative sum from `chunk_local_cumsum`. Default: zeros.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        w: [B, T, HV, K], k's dtype.
        u: [B, T, HV, V], k's dtype.

    Example:
        >>> import torch, torch_gdn
        >>> k, v, beta = torch.randn(1, 70, 2, 64), torch.randn(1, 70, 4, 32), torch.rand(1, 70, 4)
        >>> A = torch_gdn.solve_tril(torch_gdn.chunk_scaled_dot_kkt(k, beta=beta))
        >>> w, u = torch_gdn.recompute_w_u(k, v, beta, A)
        >>> w.shape, u.shape
        (torch.Size([1, 70, 4, 64]), torch.Size([1, 70, 4, 32]))
    """
    check_cu_seqlens("recompute_w_u", cu_seqlens)
    if g is None:
        g = torch.zeros_like(beta, dtype=torch.float32)
    return torch.ops.gdn.recompute_w_u(k, v, beta, A, g, cu_seqlens, chunk_indices)


recompute_w_u_fwd = recompute_w_u
