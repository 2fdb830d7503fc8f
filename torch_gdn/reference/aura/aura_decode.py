from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.aura.aura_rotate import aura_rotate


def aura_decode(
    codes: Tensor,
    norms: Tensor,
    codebook: Tensor,
    signs: Tensor,
    means: Tensor | None = None,
    rotated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The vectors [.., D] that codes [.., W] and norms [..] encode, in `dtype` (float32), or Pi times them."""
    result = dtype or torch.float32
    computed = torch.promote_types(result, torch.promote_types(norms.dtype, torch.float32))
    D, bits = signs.shape[0], codebook.shape[0].bit_length() - 1
    y = norms.to(computed)[..., None] * codebook.to(computed)[unpack(codes, bits, D)]
    mean = y.new_zeros(()) if means is None else means.to(computed)[..., None]
    if rotated:
        return (y + mean * aura_rotate(y.new_ones(D), signs)).to(result)
    return (aura_rotate(y, signs, inverse=True) + mean).to(result)


def unpack(codes: Tensor, bits: int, D: int) -> Tensor:
    """The D indices of each stream of words [.., W] int32."""
    stream = (codes.long()[..., None] >> torch.arange(32, device=codes.device) & 1).flatten(-2)
    stream = stream[..., : D * bits].unflatten(-1, (D, bits))
    return (stream << torch.arange(bits, device=codes.device)).sum(-1)
