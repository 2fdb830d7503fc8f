"""AURA's codes: encoding, decoding, and attention over them."""

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens

__all__ = [
    "aura_attention",
    "aura_decode",
    "aura_encode",
    "aura_encode_",
    "aura_flash_p1",
    "aura_flash_p2",
    "aura_paged_attention",
    "aura_paged_tile_means",
    "aura_rotate",
]


def aura_rotate(x: Tensor, signs: Tensor, scale: float = 1.0, inverse: bool = False) -> Tensor:
    """Applies the rotation of `aura_encode` to the last dimension, scale * Pi x or scale * Pi^T x, in O(D log D).

    Source: AURA (Kryski and Turney, working draft, 2026), section 2. The matrices: Sylvester 1867, Paley 1933.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride other
            than 1 costs a copy.
        signs: [D], float32. 1 or -1.
        scale: Factor of the result. Default: 1.
        inverse: Whether to multiply by Pi^T, which is the inverse of Pi. Default: False.

    Returns:
        y: x's shape, float32. Contiguous.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.aura_rotate(torch.ones(64), torch.ones(64))[:3]
        tensor([8., 0., 0.])
    """
    return torch.ops.gdn.aura_rotate(x, signs, scale, inverse)


def aura_encode(x: Tensor, signs: Tensor, boundaries: Tensor | None, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes vectors: normalises each, rotates it by Pi, and replaces each coordinate by the nearest centroid.

    Pi = H diag(signs) / sqrt(D), where H is a Hadamard matrix: Sylvester's, multiplied by Paley's of order 20 or 12 for
    D of 80 or 96. A vector with a NaN or an infinity gets codes of 0 and a norm that is not finite.

    With a codebook of two dimensions, codes are those of a trellis. The 6 bits of the stream from a value's code on
    choose its entry of the codebook. The stream is a ring: behind its last bit comes its first one. Viterbi's algorithm
    (1967) finds the codes whose vector is nearest to x, among those whose state at the ring's joint is the best one for
    the 16 values on each side.

    Source: AURA (Kryski and Turney, working draft, 2026), section 2; metaltile-std's `aura_encode`.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride other
            than 1 costs a copy.
        signs: [D], float32. 1 or -1.
        boundaries: [2 ** bits - 1], float32. In ascending order. The code of a coordinate is the number of boundaries
            below it. None for a trellis.
        codebook: [2 ** bits] or [2 ** bits, 2 ** (6 - bits)], float32. The centroid of each code, for 2, 3, 4, 5 or 8
            bits. The second is a trellis, for 2, 3 or 4 bits: entry w, row by row, is the label of window w.

    Returns:
        codes: [..., ceil(D * bits / 32)], int32. Each row is a little-endian stream of D codes. The rest of its last
            word has zeros, or for a trellis the first bits again.
        norms: [...], float16. The factors that a decoder multiplies the centroids by. A norm above 65504, which float16
            cannot hold, is infinite.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch_gdn.aura_encode(torch.ones(2, 3, 64), torch.ones(64), boundaries, codebook)
        >>> codes.shape, norms.shape
        (torch.Size([2, 3, 4]), torch.Size([2, 3]))
    """
    return torch.ops.gdn.aura_encode(x, signs, boundaries, codebook)


def aura_encode_(
    x: Tensor,
    slots: Tensor,
    signs: Tensor,
    boundaries: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    norms: Tensor,
    tile_means: Tensor | None = None,
) -> None:
    """Runs `aura_encode` and writes token t of batch row b into slot slots[t] or slots[b, t] of a cache.

    Args:
        x: [B, HK, T, D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride
            other than 1 costs a copy.
        slots: [T] or [B, T], int32 or int64. A token with a negative slot is not stored. The other slots of a row must
            differ from each other. On x's device.
        signs, boundaries, codebook: See `aura_encode`.
        codes: [B, HK, S, ceil(D * bits / 32)], int32. Written in place. S is the capacity. The last stride must be 1.
        norms: [B, HK, S], float16. Written in place.
        tile_means: [B, HK, tiles, D], float16. Vector i of tiles is subtracted from the tokens in slots 128 i to
            128 i + 127 before anything else. There is one for each 128 slots. Any strides; a last stride other than 1
            costs a copy. Default: None, for none.

    Raises:
        ValueError: If a slot is not below S. On `mps`, such a slot raises a RuntimeError at the next synchronisation,
            and nothing is stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch.zeros(1, 2, 8, 4, dtype=torch.int32), torch.zeros(1, 2, 8, dtype=torch.float16)
        >>> x, slots = torch.ones(1, 2, 1, 64), torch.tensor([5])
        >>> torch_gdn.aura_encode_(x, slots, torch.ones(64), boundaries, codebook, codes, norms)
        >>> norms[0, 0].nonzero().flatten()
        tensor([5])
    """
    torch.ops.gdn.aura_encode_(x, slots, signs, boundaries, codebook, codes, norms, tile_means)


def aura_decode(
    codes: Tensor,
    norms: Tensor,
    codebook: Tensor,
    signs: Tensor,
    rotated: bool = False,
    dtype: torch.dtype | None = None,
    tile_means: Tensor | None = None,
) -> Tensor:
    """Dequantises codes: norm * Pi^T codebook[codes] + mean. `aura_encode` defines Pi.

    Source: AURA (Kryski and Turney, working draft, 2026), section 2; metaltile-std's `aura_dequant_rotated`.

    Args:
        codes: [..., ceil(D * bits / 32)], int32. Any strides; a last stride other than 1 costs a copy.
        norms: [...], float16. Any strides.
        codebook: [2 ** bits] or [2 ** bits, 2 ** (6 - bits)], float32. The one of `aura_encode`.
        signs: [D], float32. 1 or -1. D is 64, 80, 96, 128, 256 or 512.
        rotated: Whether to leave out Pi^T and return Pi times the vector. Default: False.
        dtype: Dtype of the result: bfloat16, float16 or float32. Default: None, for float32.
        tile_means: [B, HK, tiles, D], float16. The means that `aura_encode_` subtracted, for codes [B, HK, T, ..]. Any
            strides; a last stride other than 1 costs a copy. Default: zeros.

    Returns:
        x: [..., D], dtype, or float32. Contiguous.

    Example:
        >>> import torch, torch_gdn
        >>> codebook, signs = torch.tensor([-0.19, -0.06, 0.06, 0.19]), torch.ones(64)
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> x = torch.randn(3, 64)
        >>> codes, norms = torch_gdn.aura_encode(x, signs, boundaries, codebook)
        >>> y = torch_gdn.aura_decode(codes, norms, codebook, signs)
        >>> bool((y - x).norm() < 0.5 * x.norm())
        True
    """
    return torch.ops.gdn.aura_decode(codes, norms, codebook, signs, rotated, dtype, tile_means)


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


def aura_flash_p2(
    o_partials: Tensor,
    m_partials: Tensor,
    l_partials: Tensor,
    value_signs: Tensor,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Runs pass 2 of `aura_attention`: merges the blocks of `aura_flash_p1` and rotates the result back.

    Source: metaltile-std 0.1.0, `aura_flash_pass2`; here fused with the inverse rotation of the values.

    Args:
        o_partials: [B, HQ, L, NB, D], float32.
        m_partials, l_partials: [B, HQ, L, NB], float32.
        value_signs: [D], float32. The signs that the values were encoded with.
        sinks: [HQ], float32. One more score for each head, whose value is zero (GPT-OSS). Default: None.
        dtype: Dtype of the result: bfloat16, float16 or float32. Default: None, for float32.

    Returns:
        o: [B, HQ, L, D], dtype, or float32. Contiguous. Zeros for a query that saw no key.

    Example:
        >>> import torch, torch_gdn
        >>> o, l = torch.ones(1, 1, 1, 2, 64), torch.ones(1, 1, 1, 2)
        >>> torch_gdn.aura_flash_p2(o, torch.zeros(1, 1, 1, 2), l, torch.ones(64))[..., :3]
        tensor([[[[8., 0., 0.]]]])
    """
    return torch.ops.gdn.aura_flash_p2(o_partials, m_partials, l_partials, value_signs, sinks, dtype)


def aura_paged_attention(
    q: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    key_signs: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    value_signs: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
    exact_keys: Tensor | None = None,
    exact_values: Tensor | None = None,
    exact_slots: Tensor | None = None,
    exact_starts: Tensor | None = None,
    exact_sink_slots: Tensor | None = None,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
    exact_sinks: int = 0,
    tail: int = 0,
    key_tile_means: Tensor | None = None,
) -> Tensor:
    """Computes `paged_attention` on pages of AURA codes (`aura_encode`), which the kernels dequantise tile by tile.

    With `exact_keys`, some tokens are read as the model computed them, and their codes are not read. These are the
    queries' own tokens, the `tail` tokens before them, and the first `exact_sinks` tokens. Token p of sequence n has
    row p of slot exact_sink_slots[n] if p < exact_sinks, and else row exact_sinks + p % (rows - exact_sinks) of slot
    exact_slots[n].

    Source: see `aura_attention` and `paged_attention`.

    Args:
        q: [T, HQ, D], bfloat16, float16 or float32. D is 64, 80, 96, 128 or 256. Any strides; a last stride other than
            1 costs a copy.
        key_codes: [blocks, block_size, HK, ceil(D * key_bits / 32)], int32. HQ is a
            multiple of HK. The last stride must be 1.
        key_norms: [blocks, block_size, HK], float16. Any strides.
        key_codebook: [2 ** key_bits] or [2 ** key_bits, 2 ** (6 - key_bits)], float32. The one of `aura_encode`.
        key_signs: [D], float32. The signs that the keys were encoded with.
        value_codes: [blocks, block_size, HK, ceil(D * value_bits / 32)], int32. The last
            stride must be 1.
        value_norms: [blocks, block_size, HK], float16. Any strides.
        value_codebook: [2 ** value_bits] or [2 ** value_bits, 2 ** (6 - value_bits)], float32. As key_codebook.
        value_signs: [D], float32. The signs that the values were encoded with.
        block_table, cu_seqlens, seq_lens, scale, causal, window, sinks: See `paged_attention`.
        max_query_len, max_seq_len, out: See `paged_attention`.
        exact_keys, exact_values: [slots, rows, HK, D], q's dtype. The last stride must be 1. If one of the seven
            tensors of exact rows is given, all are. Default: None.
        exact_slots: [N], int32 or int64. A sequence with a negative slot has no exact tail. Default: None.
        exact_starts: [N], int32 or int64. The tail has no tokens before exact_starts[n], for example those of a prefix
            that another request computed. Default: None.
        exact_sink_slots: [N], int32 or int64. A sequence with a negative one reads its first tokens from codes.
            Default: None.
        new_keys, new_values: [T, HK, D], q's dtype. Keys and values of the queries' own tokens, packed as q. The last
            stride must be 1. Default: None.
        exact_sinks: The number of first tokens that have rows of their own, at most `rows`. Default: 0.
        tail: The number of tokens before the queries, at most rows - exact_sinks. Default: 0.
        key_tile_means: [blocks, block_size / 128, HK, D], float16. The means that were subtracted from the keys of each
            tile of 128 slots (`tile_means` of `aura_encode_`). The last stride must be 1, and block_size a multiple of
            128. Default: None.

    Returns:
        out: See `paged_attention`.

    Raises:
        ValueError, RuntimeError: See `paged_attention`.

    Example:
        >>> import torch, torch_gdn
        >>> from torch_gdn.aura import codebooks
        >>> codebook, signs = codebooks.codebook(8, 64), codebooks.aura_signs(64, 1)
        >>> k, v, q = torch.randn(3, 16, 2, 64), torch.randn(3, 16, 2, 64), torch.randn(1, 4, 64)
        >>> tables = (signs, codebooks.boundaries(codebook), codebook)
        >>> cache = [part for x in (k, v) for part in (*torch_gdn.aura_encode(x, *tables)[:2], codebook, signs)]
        >>> table, boundaries = torch.tensor([[2, 0]]), torch.tensor([0, 1])
        >>> sequence = (table, boundaries, torch.tensor([20]))
        >>> o = torch_gdn.aura_paged_attention(q, *cache, *sequence)
        >>> exact = torch_gdn.paged_attention(q, k, v, *sequence)
        >>> bool((o - exact).norm() < 0.03 * exact.norm())
        True
    """
    check_cu_seqlens("aura_paged_attention", cu_seqlens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    keys = (key_codes, key_norms, key_codebook, key_signs)
    values = (value_codes, value_norms, value_codebook, value_signs)
    torch.ops.gdn.aura_paged_attention_(
        out,
        q,
        *keys,
        *values,
        block_table,
        cu_seqlens,
        seq_lens,
        max_query_len=q.size(0) if max_query_len is None else max_query_len,
        max_seq_len=block_table.size(1) * key_codes.size(1) if max_seq_len is None else max_seq_len,
        scale=scale,
        causal=causal,
        window=window,
        sinks=sinks,
        exact_keys=exact_keys,
        exact_values=exact_values,
        exact_slots=exact_slots,
        exact_starts=exact_starts,
        exact_sink_slots=exact_sink_slots,
        new_keys=new_keys,
        new_values=new_values,
        exact_sinks=exact_sinks,
        tail=tail,
        key_tile_means=key_tile_means,
    )
    return out


def aura_paged_tile_means(
    keys: Tensor,
    tile_means: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    exact_keys: Tensor,
    exact_slots: Tensor,
    exact_starts: Tensor,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    exact_sinks: int = 0,
    tail: int = 0,
) -> None:
    """Finds the means of keys of the tiles that a step begins, for pages of AURA codes.

    A tile is 128 tokens of a sequence, from a multiple of 128 on. If its first token is new, its mean becomes that of
    the newest keys up to the last new token of the tile: at most 128 of the new keys and of the exact rows before them,
    without the first `exact_sinks` tokens. If there are fewer than 32 such keys, it becomes the mean of the tile
    before. The first tile takes the mean of what there is, or zeros. Other tiles keep their means. A mean that float16
    cannot hold becomes 0.

    Call this before `aura_encode_` with the same means as `tile_means`. `aura_paged_attention` takes them as
    `key_tile_means`.

    Source: none. The means are a zero point for each channel, as KIVI (arXiv 2402.02750) has it for keys.

    Args:
        keys: [T, HK, D], bfloat16, float16 or float32. The new keys, packed. The last stride must be 1.
        tile_means: [blocks, tiles, HK, D], float16. Blocks have 128 times `tiles` tokens. Written in place. The last
            stride must be 1.
        block_table, cu_seqlens, seq_lens: See `paged_attention`. The new keys are the last ones of each sequence.
        exact_keys: [slots, rows, HK, D], keys' dtype. See `aura_paged_attention`.
        exact_slots, exact_starts: See `aura_paged_attention`.
        max_query_len: The largest number of new keys in a sequence. Default: T.
        max_seq_len: The largest of seq_lens. Default: all tokens of the blocks in a row of block_table.
        exact_sinks, tail: See `aura_paged_attention`. Default: 0.

    Raises:
        ValueError, RuntimeError: See `paged_attention`.

    Example:
        >>> import torch, torch_gdn
        >>> means, keys = torch.zeros(2, 1, 1, 64, dtype=torch.float16), 3 + torch.randn(128, 1, 64)
        >>> sequence = (torch.tensor([[1]]), torch.tensor([0, 128]), torch.tensor([128]))
        >>> exact = (torch.zeros(1, 8, 1, 64), torch.tensor([-1]), torch.tensor([0]))
        >>> torch_gdn.aura_paged_tile_means(keys, means, *sequence, *exact)
        >>> torch.equal(means[1, 0, 0], keys[:, 0].mean(0).half()), means[0].count_nonzero().item()
        (True, 0)
    """
    check_cu_seqlens("aura_paged_tile_means", cu_seqlens)
    torch.ops.gdn.aura_paged_tile_means_(
        keys,
        tile_means,
        block_table,
        cu_seqlens,
        seq_lens,
        exact_keys,
        exact_slots,
        exact_starts,
        max_query_len=keys.size(0) if max_query_len is None else max_query_len,
        max_seq_len=block_table.size(1) * tile_means.size(1) * 128 if max_seq_len is None else max_seq_len,
        exact_sinks=exact_sinks,
        tail=tail,
    )
