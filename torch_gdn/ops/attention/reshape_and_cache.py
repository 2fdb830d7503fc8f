from __future__ import annotations

import torch
from torch import Tensor


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of new tokens into the pages of a cache, in the cache's dtype.

    Source: vLLM's operation of this name.

    Args:
        key: [T, H, D], bfloat16, float16 or float32. Any strides; a last stride other than 1 costs a copy.
        value: [T, H, DV], key's dtype. Any strides; a last stride other than 1 costs a copy.
        key_cache: [blocks, block_size, H, D], bfloat16, float16 or float32. Written in place. The last stride must be
            1. Keys and values may share pages, as pages[..., :D] and pages[..., D:].
        value_cache: [blocks, block_size, H, DV], key_cache's dtype. Written in place. The last stride must be 1.
        slot_mapping: [N], int32 or int64. The slot of each of the first N tokens: block * block_size + offset. N is at
            most T. A token with a negative slot is not stored. No two tokens may have one slot. On key's device.

    Raises:
        ValueError: If a slot is not below blocks * block_size. On `mps`, such a slot raises a RuntimeError at the next
            synchronisation, and nothing is stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> pages = torch.zeros(3, 16, 2, 128)  # keys and values of 64
        >>> keys, values = pages.chunk(2, dim=-1)
        >>> x, slots = torch.ones(2, 2, 64), torch.tensor([20, -1])
        >>> torch_gdn.reshape_and_cache(x, x, keys, values, slots)
        >>> pages.sum((2, 3)).nonzero()
        tensor([[1, 4]])
    """
    torch.ops.gdn.reshape_and_cache_(key, value, key_cache, value_cache, slot_mapping)
