from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """Which chunk of which sequence each chunk of packed sequences is.

    FLA: `fla.ops.utils.prepare_chunk_indices`. Reads cu_seqlens on the host: on `mps` that waits for the device, so
    call it once a batch, not once a layer.

    Args:
        cu_seqlens: [N + 1] int32 or int64, boundaries of packed sequences.
        chunk_size: tokens a chunk. Default: 64.

    Returns:
        [NT, 2], dtype and device of cu_seqlens: (sequence, chunk in the sequence), in order.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.prepare_chunk_indices(torch.tensor([0, 17, 17, 100]), 64)
        tensor([[0, 0],
                [2, 0],
                [2, 1]])
    """
    check_cu_seqlens("prepare_chunk_indices", cu_seqlens)
    pairs = [
        (n, chunk)
        for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist()))
        for chunk in range(-(-(last - first) // chunk_size))
    ]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)
