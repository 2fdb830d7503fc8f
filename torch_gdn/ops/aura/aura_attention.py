from __future__ import annotations

import torch
from torch import Tensor


def aura_attention(
    q: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    key_signs: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    value_signs: Tensor,
    key_means: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int | None = None,
    length: int | None = None,
) -> Tensor:
    """Attention to keys and values held as codes (`aura_encode`), dequantised in registers, never in memory.

    q is rotated as the keys were; `aura_flash_p1` and `aura_flash_p2` follow, and rotate the result back.

    Source: AURA (Kryski and Turney, working draft, 2026), section 3; metaltile-std 0.1.0.

    Args:
        q: [B, HQ, L, D], bfloat16, float16 or float32; D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride
            other than 1 costs a copy.
        key_codes: [B, HK, T, ceil(D * bits / 32)] int32 and key_norms: [B, HK, T] float32, a slice of a cache with any
            strides; HQ is a multiple of HK, and KV head h serves the query heads from h * HQ / HK on.
        key_codebook: [2^bits] float32; bits is 2, 3, 4 or 8.
        key_signs: [D] float32, those that the keys were encoded with.
        value_codes, value_norms, value_codebook, value_signs: as the keys', with bits and signs of their own.
        key_means, value_means: [B, HK, T] float32, the means taken off keys and values. Default: None.
        starts: [B] int32 or int64, the first key of each row that is not padding. Default: None, 0.
        sinks: [HQ] float32, one more score for each head, whose value is zero (GPT-OSS). Default: None.
        scale: Default: D ** -0.5.
        causal: query i, at position q_offset + i, sees no later key. Default: True.
        q_offset: Default: T - L, queries are the last positions.
        window: a query sees only so many keys up to its own position; 0 is no window. Default: 0.
        block_size: keys of a block of pass 1, a multiple of 16. Default: chosen from T and the number of query rows.
        length: how many keys there are, the first of codes, norms and means, and so T in all of the above: a cache need
            not be sliced at each step. Default: all.

    Returns:
        [B, HQ, L, D], dtype of q, contiguous; zeros for a query that sees no key.

    Raises:
        ValueError: a shape, head count, size or device that is not as above, or a window where causal is False.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> from torch_gdn.aura import codebooks
        >>> codebook, signs = codebooks.codebook(8, 64), codebooks.aura_signs(64, 1)
        >>> k, v, q = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 4, 1, 64)
        >>> tables = (signs, codebooks.boundaries(codebook), codebook)
        >>> cache = [part for x in (k, v) for part in (*torch_gdn.aura_encode(x, *tables)[:2], codebook, signs)]
        >>> o = torch_gdn.aura_attention(q, *cache)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        >>> bool((o - exact).norm() < 0.03 * exact.norm())
        True
    """
    keys = (key_codes, key_norms, key_codebook, key_signs)
    values = (value_codes, value_norms, value_codebook, value_signs)
    masks = (starts, sinks, scale, causal, q_offset, window)
    return torch.ops.gdn.aura_attention(q, *keys, *values, key_means, value_means, *masks, block_size, length)
