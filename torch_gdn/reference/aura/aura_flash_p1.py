from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.aura.aura_attention import visible, weighted
from torch_gdn.reference.aura.aura_decode import unpack
from torch_gdn.reference.common import compute_dtype


def aura_flash_p1(
    q_rot: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    key_means: Tensor | None = None,
    q_sums: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax over each block of keys by itself, on codes, for q_rot [B, HQ, L, D] that is rotated and scaled.

    o_partials [B, HQ, L, NB, D] (not divided by l, in the values' rotated space), the largest score m_partials and the
    sum of exponentials l_partials [B, HQ, L, NB], and mean_partials, the same weights' sum of value means (or [0]).
    """
    dtype = compute_dtype(q_rot)
    B, HQ, L, D = q_rot.shape
    T, ratio = key_codes.shape[2], HQ // key_codes.shape[1]

    def heads(x: Tensor) -> Tensor:
        return x.to(dtype).repeat_interleave(ratio, dim=1)

    def vectors(codes: Tensor, norms: Tensor, codebook: Tensor) -> Tensor:
        bits = codebook.shape[0].bit_length() - 1
        return heads(norms.to(dtype)[..., None] * codebook.to(dtype)[unpack(codes, bits, D)])

    keys, values = vectors(key_codes, key_norms, key_codebook), vectors(value_codes, value_norms, value_codebook)
    scores = q_rot.to(dtype) @ keys.transpose(-1, -2)
    if key_means is not None:
        assert q_sums is not None
        scores = scores + q_sums.to(dtype)[..., None] * heads(key_means)[:, :, None]
    seen = visible(B, L, T, starts, causal, q_offset, window, q_rot.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    o, m, sums, mean = [], [], [], []
    for first in range(0, T, block_size):
        block = slice(first, min(first + block_size, T))
        largest = scores[..., block].amax(-1)
        weights = torch.exp(scores[..., block] - largest.nan_to_num(neginf=0.0)[..., None])
        o.append(weighted(weights, values[:, :, block], seen[..., block]))
        m.append(largest)
        sums.append(weights.sum(-1))
        if value_means is not None:
            means = heads(value_means)[:, :, block, None]
            mean.append(weighted(weights, means, seen[..., block]).squeeze(-1))
    if T == 0:
        none = q_rot.new_empty(B, HQ, L, 0, dtype=dtype)
        return (
            none[..., None].expand(B, HQ, L, 0, D),
            none,
            none,
            none if value_means is not None else none.new_empty(0),
        )
    mean_partials = torch.stack(mean, dim=3) if value_means is not None else o[0].new_empty(0)
    return torch.stack(o, dim=3), torch.stack(m, dim=3), torch.stack(sums, dim=3), mean_partials
