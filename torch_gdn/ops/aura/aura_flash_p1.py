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
    key_means: Tensor | None = None,
    q_sums: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pass 1 of `aura_attention`: a softmax over each block of keys by itself, on codes.

    Source: metaltile-std 0.1.0, `aura_flash_p1`; here with any strides, queries and masks, and m, l and o in float32.

    Args:
        q_rot: [B, HQ, L, D] float32, scale * Pi q with the keys' Pi: `aura_rotate(q, key_signs, scale)`.
        key_codes: [B, HK, T, ceil(D * bits / 32)] int32 and key_norms: [B, HK, T] float32, a slice of a cache with any
            strides; HQ is a multiple of HK, and KV head h serves the query heads from h * HQ / HK on.
        key_codebook: [2^bits] float32; bits is 2, 3, 4 or 8.
        value_codes, value_norms, value_codebook: as the keys', with bits of their own.
        key_means: [B, HK, T] float32, the means taken off the keys. Default: None.
        q_sums: [B, HQ, L] float32, scale * q.sum(-1) of the q before the rotation; with key_means alone. Default: None.
        value_means: [B, HK, T] float32. Default: None.
        starts: [B] int32 or int64, the first key of each row that is not padding. Default: None, 0.
        causal: query i, at position q_offset + i, sees no later key. Default: True.
        q_offset: Default: T - L, queries are the last positions.
        window: a query sees only so many keys up to its own position; 0 is no window. Default: 0.
        block_size: keys of a block, a multiple of 16. Default: 64.

    Returns:
        o_partials [B, HQ, L, NB, D], NB = ceil(T / block_size): sums of exp(score - m) times values, in the values'
        rotated space; m_partials and l_partials [B, HQ, L, NB]: the largest score, and the sum of exp(score - m);
        mean_partials [B, HQ, L, NB], such sums of value_means, or [0]. All float32. A block without a visible key has
        m = -inf, l = 0 and o = 0.

    Raises:
        ValueError: a shape, head count, size or device that is not as above, or a window where causal is False.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> codebook, signs = torch.tensor([-0.19, -0.06, 0.06, 0.19]), torch.ones(64)
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms, _ = torch_gdn.aura_encode(torch.randn(1, 2, 100, 64), signs, boundaries, codebook)
        >>> q_rot = torch_gdn.aura_rotate(torch.randn(1, 4, 1, 64), signs, 64**-0.5)
        >>> o, m, l, _ = torch_gdn.aura_flash_p1(q_rot, codes, norms, codebook, codes, norms, codebook)
        >>> o.shape, m.shape
        (torch.Size([1, 4, 1, 2, 64]), torch.Size([1, 4, 1, 2]))
    """
    keys, values = (key_codes, key_norms, key_codebook), (value_codes, value_norms, value_codebook)
    means, mask = (key_means, q_sums, value_means), (starts, causal, q_offset, window)
    return torch.ops.gdn.aura_flash_p1(q_rot, *keys, *values, *means, *mask, block_size)
