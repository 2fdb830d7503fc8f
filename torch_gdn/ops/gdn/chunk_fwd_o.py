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
    """o = scale ((q exp(g)) h + tril(q k^T exp(g_i - g_j)) v) in each chunk: the output of the gated delta rule.

    FLA: `fla.ops.common.chunk_o.chunk_fwd_o`, without its `g_gamma`.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32, K up to 256.
        v: [B, T, HV, V], dtype of q, v_new of `chunk_fwd_h`, V up to 512; HV is a multiple of H.
        h: [B, NT, HV, K, V] ([B, NT, HV, V, K] with state_v_first), dtype of q, of `chunk_fwd_h` with the same
            cu_seqlens and chunk_indices.
        g: [B, T, HV] float32, the cumulative sum of `chunk_local_cumsum`. Default: zeros.
        scale: Default: K ** -0.5.
        state_v_first: states are [V, K] instead of [K, V]. Default: False.
        cu_seqlens: [N + 1] int32 or int64, boundaries of packed sequences (B is 1). Default: None.
        chunk_size: 16, 32 or 64. Default: 64.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`. Default: None.

    Returns:
        o [B, T, HV, V], dtype of q.

    Raises:
        ValueError: a shape, head count, chunk_size, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
