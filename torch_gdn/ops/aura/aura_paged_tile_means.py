from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


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
        >>> of_sequence = (torch.tensor([[1]]), torch.tensor([0, 128]), torch.tensor([128]))
        >>> exact = (torch.zeros(1, 8, 1, 64), torch.tensor([-1]), torch.tensor([0]))
        >>> torch_gdn.aura_paged_tile_means(keys, means, *of_sequence, *exact)
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
