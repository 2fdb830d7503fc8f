from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import LOWEST_LOG_DECAY, chunks, compute_dtype


def chunk_local_cumsum(g: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None) -> Tensor:
    """The sum of g [B, T, HV] from the start of each token's chunk up to the token."""
    g = g.to(compute_dtype(g)).clamp(min=LOWEST_LOG_DECAY)
    out = torch.empty_like(g)
    for _, b, first, last, _ in chunks(g.shape[0], g.shape[1], chunk_size, cu_seqlens):
        out[b, first:last] = g[b, first:last].cumsum(0)
    return out
