from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, *, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> Tensor:
    """Sums the log decays from the start of each token's chunk up to the token.

    FLA: `fla.ops.utils.chunk_local_cumsum`, without its `reverse`, `scale` and `output_dtype`: the sum is forward, in
    the natural logarithm and float32.

    Args:
        g: [B, T, HV], any floating dtype. Values below -104 are taken as -104: their exp is 0 in float32 all the same.
        chunk_size: 16, 32 or 64. Default: 64.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on g's
            device. Chunks restart at each sequence. Default: None, a batch of B sequences of T tokens.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`; saves nothing here and is accepted for FLA's callers.

    Returns:
        [B, T, HV] float32.

    Raises:
        ValueError: a shape, chunk_size, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: g requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.chunk_local_cumsum(torch.full((1, 20, 1), -0.5), chunk_size=16)[0, [0, 15, 16], 0]
        tensor([-0.5000, -8.0000, -0.5000])
    """
    check_cu_seqlens("chunk_local_cumsum", cu_seqlens)
    return torch.ops.gdn.chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices)
