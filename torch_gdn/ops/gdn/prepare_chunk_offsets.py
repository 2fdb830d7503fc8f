from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from torch_gdn.ops.arguments import check_cu_seqlens


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int = 64) -> Tensor:
    """Counts the chunks before each packed sequence, which is the row of h at which the sequence starts.

    FLA: `fla.ops.utils.prepare_chunk_offsets`.

    Args:
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N packed sequences.
        chunk_size: Tokens per chunk. Default: 64.

    Returns:
        chunk_offsets: [N + 1], int64. The last one is the number of chunks. On the device of cu_seqlens.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.prepare_chunk_offsets(torch.tensor([0, 17, 17, 100]), 64)
        tensor([0, 1, 1, 3])
    """
    check_cu_seqlens("prepare_chunk_offsets", cu_seqlens)
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    return pad(chunks.cumsum(0), (1, 0))
