from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.aura.aura_rotate import aura_rotate
from torch_gdn.reference.common import compute_dtype


def aura_encode(
    x: Tensor, signs: Tensor, boundaries: Tensor, codebook: Tensor, with_means: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors x [.., D] as codes [.., W] int32, norms [..] and means [..] (or [0]); the last two in x's dtype, at least
    float32.

    The norm is that of x over that of its centroids, so that decoding gives back the norm of x. Codes of a vector that
    is not finite, or whose norm is not, are 0, and its norm says so.
    """
    dtype = compute_dtype(x)
    x, boundaries, codebook = x.to(dtype), boundaries.to(dtype), codebook.to(dtype)
    means = x.mean(-1) if with_means else x.new_empty(0)
    if with_means:
        x = x - means[..., None]
    r = x.norm(dim=-1)
    direction = torch.where((r > 0)[..., None], x / r[..., None], 0.0)
    indices = quantise(aura_rotate(direction, signs), boundaries)
    indices = torch.where(r.isfinite()[..., None], indices, 0)
    norms = r / codebook[indices].norm(dim=-1)
    return pack(indices, codebook.shape[0].bit_length() - 1), norms, means


def quantise(y: Tensor, boundaries: Tensor) -> Tensor:
    """For each coordinate the number of boundaries below it: its centroid's index."""
    return torch.searchsorted(boundaries, y.contiguous())


def pack(indices: Tensor, bits: int) -> Tensor:
    """Indices [.., D] as a little-endian stream of D * bits bits in ceil(D * bits / 32) words, int32."""
    D = indices.shape[-1]
    words = (D * bits + 31) // 32
    stream = (indices[..., None] >> torch.arange(bits, device=indices.device) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, words * 32 - D * bits)).unflatten(-1, (words, 32))
    unsigned = (stream << torch.arange(32, device=indices.device)).sum(-1)
    return torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).int()
