from __future__ import annotations

import torch
from torch import Tensor


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Keys and values of new tokens into the pages of a cache, in the cache's dtype: token t goes to slot_mapping[t].

    Source: vLLM's operation of this name.

    Args:
        key: [T, H, D], bfloat16, float16 or float32. Any strides; a last stride other than 1 costs a copy.
        value: [T, H, DV], dtype of key.
        key_cache: [blocks, block_size, H, D], bfloat16, float16 or float32, written in place. Any strides but a last
            one of 1. Keys and values may share pages, as pages[..., :D] and pages[..., D:].
        value_cache: [blocks, block_size, H, DV], dtype of key_cache, written in place.
        slot_mapping: [N] int32 or int64 on key's device, N at most T: block * block_size + offset for each of the first
            N tokens; a token with a negative slot is not stored. No slot twice.

    Returns:
        nothing; key_cache and value_cache are changed.

    Raises:
        ValueError: a shape, size or device that is not as above, or a slot that is not below blocks * block_size; on
            `mps` nothing is stored for such a slot, and the error is a RuntimeError of the next synchronisation.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
