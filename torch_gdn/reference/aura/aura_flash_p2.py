from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.aura.aura_rotate import aura_rotate


def aura_flash_p2(
    o_partials: Tensor,
    m_partials: Tensor,
    l_partials: Tensor,
    value_signs: Tensor,
    mean_partials: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The blocks of `aura_flash_p1` merged into one softmax, in the values' own space: [B, HQ, L, D]."""
    m = m_partials
    if sinks is not None:  # one more block, of a score alone
        m = torch.cat([m, sinks.to(m.dtype)[:, None, None].expand(*m.shape[:3], 1)], dim=-1)
    largest = m.amax(-1, keepdim=True) if m.shape[-1] else m.new_zeros(*m.shape[:3], 1)
    factors = torch.exp(m - largest.nan_to_num(neginf=0.0))
    blocks = factors[..., : m_partials.shape[-1]]
    total = (blocks * l_partials).sum(-1, keepdim=True) + factors[..., m_partials.shape[-1] :].sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)  # no key was seen: 0
    o = aura_rotate((blocks[..., None] * o_partials).sum(3) / total, value_signs, inverse=True)
    if mean_partials is not None:
        o = o + (blocks * mean_partials).sum(-1, keepdim=True) / total
    return o.to(dtype or torch.float32)
