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
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int | None = None,
    length: int | None = None,
    exact_keys: Tensor | None = None,
    exact_values: Tensor | None = None,
    exact_sinks: int = 0,
    exact_length: int | None = None,
    key_tile_means: Tensor | None = None,
) -> Tensor:
    """Attends to keys and values stored as codes (`aura_encode`), and to exact ones before and behind them.

    The kernels dequantise the codes in registers, never in memory. The op rotates q as the keys were rotated and runs
    `aura_flash_p1` and `aura_flash_p2`, which rotates the result back. Exact rows get a softmax of their own, of q as
    it is, which the second pass merges with those of the codes.

    Source: AURA (Kryski and Turney, working draft, 2026), section 3; metaltile-std 0.1.0.

    Args:
        q: [B, HQ, L, D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride
            other than 1 costs a copy.
        key_codes: [B, HK, T, ceil(D * key_bits / 32)], int32. A slice of a cache, with any strides. HQ is a multiple of
            HK, and KV head h serves HQ / HK query heads, starting with h * HQ / HK.
        key_norms: [B, HK, T], float16. Any strides.
        key_codebook: [2 ** key_bits] or [2 ** key_bits, 2 ** (6 - key_bits)], float32. The one of `aura_encode`.
        key_signs: [D], float32. The signs that the keys were encoded with.
        value_codes: [B, HK, T, ceil(D * value_bits / 32)], int32. Any strides.
        value_norms: [B, HK, T], float16. Any strides.
        value_codebook: [2 ** value_bits] or [2 ** value_bits, 2 ** (6 - value_bits)], float32. As key_codebook.
        value_signs: [D], float32. The signs that the values were encoded with.
        starts: [B], int32 or int64. The first key of each row that is not padding. On q's device. Default: zeros.
        sinks: [HQ], float32. One more score for each head, whose value is zero (GPT-OSS). Default: None.
        scale: Factor of q k^T. Default: D ** -0.5.
        causal: Whether a query sees no later key. Query i has position q_offset + i. Default: True.
        q_offset: The position of the first query. Default: T + E - L with E exact rows, so that queries have the last
            positions.
        window: The number of keys that a query sees, up to its own position. With 0 it sees all of them. Requires
            causal. Default: 0.
        block_size: The number of keys per block of pass 1, a multiple of 16. Default: chosen from T and the query rows.
        length: The number of keys to attend to; the rest of the codes and norms is ignored, so that a cache need
            not be sliced at each step. Default: T.
        exact_keys: [B, HK, R, D], q's dtype. Rows that are no codes. Any strides; a last stride other than 1 costs a
            copy. Default: None, for none.
        exact_values: [B, HK, R, D], q's dtype. Required with exact_keys, else not allowed. A value that is not finite
            may also reach other queries of the call that do not see it, because they share tiles of rows. Default:
            None.
        exact_sinks: How many exact rows precede the codes. They have the positions 0, 1, ..; the codes follow, and then
            the other exact rows. Default: 0.
        exact_length: The number E of exact rows to attend to; the rest is ignored. Default: R.
        key_tile_means: [B, HK, tiles, D], float16. The means that `aura_encode_` subtracted from keys, with a tile for
            each 128 keys. Any strides; a last stride other than 1 costs a copy. Default: None, for none.

    Returns:
        o: [B, HQ, L, D], q's dtype. Contiguous. Zeros for a query that sees no key.

    Raises:
        ValueError: If there is a window without causal.

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
    sizes, exact = (block_size, length), (exact_keys, exact_values, exact_sinks, exact_length)
    return torch.ops.gdn.aura_attention(q, *keys, *values, *masks, *sizes, *exact, key_tile_means)
