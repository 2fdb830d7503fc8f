from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """Lists the chunks of packed sequences.

    FLA: `fla.ops.utils.prepare_chunk_indices`. The function reads cu_seqlens on the host. On `mps` that waits for the
    device, so call it once per batch, not once per layer.

    Args:
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N packed sequences.
        chunk_size: Tokens per chunk. Default: 64.

    Returns:
        chunk_indices: [NT, 2], cu_seqlens's dtype. The sequence of each chunk and the chunk's number in that sequence,
            in order. On the device of cu_seqlens.

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
