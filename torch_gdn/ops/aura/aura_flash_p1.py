from __future__ import annotations

import torch
from torch import Tensor


def aura_flash_p1(
    q_rot: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    starts: Tensor | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int = 64,
    tile_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs pass 1 of `aura_attention`: a softmax over each block of keys, computed from codes.

    Source: metaltile-std 0.1.0, `aura_flash_p1`; here with any strides, queries and masks, and m, l and o in float32.

    Args:
        q_rot: [B, HQ, L, D], float32. scale * Pi q with the keys' Pi: `aura_rotate(q, key_signs, scale)`.
        key_codes: [B, HK, T, ceil(D * key_bits / 32)], int32. See `aura_attention`.
        key_norms, key_codebook: See `aura_attention`.
        value_codes, value_norms, value_codebook: See `aura_attention`.
        starts, causal, q_offset, window: See `aura_attention`.
        block_size: The number of keys per block, a multiple of 16. Default: 64.
        tile_scores: [B, HQ, L, ceil(T / 128)], float32. scale * q k^T with the means of each 128 keys as k
            (key_tile_means of `aura_attention`). Any strides. Default: zeros.

    Returns:
        o_partials: [B, HQ, L, NB, D], float32. Sums of exp(score - m) times values, in the values' rotated space. NB is
            ceil(T / block_size). A block without a visible key has m = -inf, l = 0 and o = 0.
        m_partials: [B, HQ, L, NB], float32. The largest score of each block.
        l_partials: [B, HQ, L, NB], float32. Sums of exp(score - m).

    Raises:
        ValueError: If there is a window without causal.

    Example:
        >>> import torch, torch_gdn
        >>> codebook, signs = torch.tensor([-0.19, -0.06, 0.06, 0.19]), torch.ones(64)
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch_gdn.aura_encode(torch.randn(1, 2, 100, 64), signs, boundaries, codebook)
        >>> q_rot = torch_gdn.aura_rotate(torch.randn(1, 4, 1, 64), signs, 64**-0.5)
        >>> o, m, l = torch_gdn.aura_flash_p1(q_rot, codes, norms, codebook, codes, norms, codebook)
        >>> o.shape, m.shape
        (torch.Size([1, 4, 1, 2, 64]), torch.Size([1, 4, 1, 2]))
    """
    keys, values = (key_codes, key_norms, key_codebook), (value_codes, value_norms, value_codebook)
    mask = (starts, causal, q_offset, window)
    return torch.ops.gdn.aura_flash_p1(q_rot, *keys, *values, *mask, block_size, tile_scores)
