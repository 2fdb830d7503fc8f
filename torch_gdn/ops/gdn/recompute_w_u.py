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
    """w = A (beta k exp(g)) and u = A (beta v) in each chunk: the WY form of the chunk's updates.

    FLA: `fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd`.

    Args:
        k: [B, T, H, K], bfloat16, float16 or float32, K up to 256.
        v: [B, T, HV, V], dtype of k, V up to 512; HV is a multiple of H.
        beta: [B, T, HV], any floating dtype.
        A: [B, T, HV, chunk_size] float32, the inverse of `solve_tril`.
        g: [B, T, HV] float32, the cumulative sum of `chunk_local_cumsum`. Default: zeros.
        cu_seqlens: [N + 1] int32 or int64, boundaries of packed sequences (B is 1). Default: None.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`. Default: None.

    Returns:
        w [B, T, HV, K] and u [B, T, HV, V], dtype of k.

    Raises:
        ValueError: a shape, head count, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
