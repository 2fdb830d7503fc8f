"""Lets a first prompt attend to its own keys and values before they become codes."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_gdn

UNPADDED = "aura_unpadded"  # attribute of a mask of starts that are all 0


def is_unpadded(starts: Tensor | None) -> bool:
    return starts is None or getattr(starts, UNPADDED, False)


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, sinks: Tensor | None) -> Tensor:
    """Computes causal attention of q [B, HQ, L, D] to k, v [B, HK, L, D] as [B, L, HQ, D]. Each batch row is a page."""
    B, HQ, L, D = q.shape
    rows = torch.arange(B + 1, dtype=torch.int32)
    key_pages, value_pages = k.transpose(1, 2), v.transpose(1, 2)
    o = torch_gdn.paged_attention(
        q.transpose(1, 2).flatten(0, 1),
        key_pages,
        value_pages,
        block_table=rows[:B, None],
        cu_seqlens=L * rows,
        seq_lens=torch.full((B,), L, dtype=torch.int32),
        scale=scale,
        window=window,
        sinks=sinks,
        max_query_len=L,
        max_seq_len=L,
    )
    return o.view(B, L, HQ, D)
