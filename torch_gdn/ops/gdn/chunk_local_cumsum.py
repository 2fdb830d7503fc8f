from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, *, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> Tensor:
    """Sums the log decays from the start of each token's chunk up to the token.

    FLA: `fla.ops.utils.chunk_local_cumsum`, without its `reverse`, `scale` and `output_dtype`. The sum is always
    forward, in natural logarithms and in float32.

    Args:
        g: [B, T, HV], any floating dtype. Values below -104 count as -104; exp of either is 0 in float32.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        g_cumsum: [B, T, HV], float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.chunk_local_cumsum(torch.full((1, 20, 1), -0.5), chunk_size=16)[0, [0, 15, 16], 0]
        tensor([-0.5000, -8.0000, -0.5000])
    """
    check_cu_seqlens("chunk_local_cumsum", cu_seqlens)
    return torch.ops.gdn.chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices)
