from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


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
        >>> of_sequence = (table, boundaries, torch.tensor([20]))
        >>> o = torch_gdn.aura_paged_attention(q, *cache, *of_sequence)
        >>> exact = torch_gdn.paged_attention(q, k, v, *of_sequence)
        >>> bool((o - exact).norm() < 0.03 * exact.norm())
        True
    """
    check_cu_seqlens("aura_paged_attention", cu_seqlens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    torch.ops.gdn.aura_paged_attention_(
        out,
        q,
        key_codes,
        key_norms,
        key_codebook,
        key_signs,
        value_codes,
        value_norms,
        value_codebook,
        value_signs,
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
