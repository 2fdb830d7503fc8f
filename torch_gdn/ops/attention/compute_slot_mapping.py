from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def compute_slot_mapping(
    positions: Tensor, cu_seqlens: Tensor, block_table: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Finds where the keys and values of a batch's tokens go in a cache of pages, as `reshape_and_cache` needs it.

    A token at position p of sequence n gets the slot
    `block_table[n, p // block_size] * block_size + p % block_size`.

    Source: the kernel of this name in vLLM's block tables.

    Args:
        positions: [T], int32 or int64. The position of each token in its sequence.
        cu_seqlens: [N + 1], int32 or int64. Tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 belong to sequence n. The
            first boundary is 0, and the last is at most T. On the device of positions or on the CPU.
        block_table: [N, blocks], int32 or int64. The blocks of each sequence, in the order of its tokens. On
            the device of positions or on the CPU.
        block_size: The number of tokens per block. The blocks of a sequence have fewer than 2^31 tokens.
        slot_mapping: [slots], int32 or int64. Written in place; slots is at least T. Entries from cu_seqlens[N] on
            become -1, which `reshape_and_cache` skips.

    Raises:
        ValueError: If boundaries descend, if a position lies beyond the blocks of its sequence, or if a block is
            negative or its slots exceed slot_mapping's dtype. On `mps`, wrong contents raise a RuntimeError at the next
            synchronisation; the entry of such a token becomes -1.

    Example:
        >>> import torch, torch_gdn
        >>> table, slots = torch.tensor([[4, 1], [0, 2]]), torch.zeros(5, dtype=torch.int64)
        >>> torch_gdn.compute_slot_mapping(torch.tensor([15, 16, 20]), torch.tensor([0, 2, 3]), table, 16, slots)
        >>> slots
        tensor([79, 16, 36, -1, -1])
    """
    check_cu_seqlens("compute_slot_mapping", cu_seqlens)
    torch.ops.gdn.compute_slot_mapping_(positions, cu_seqlens, block_table, block_size, slot_mapping)
