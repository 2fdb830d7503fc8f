from __future__ import annotations

import torch
from torch import Tensor


def qk_norm_rope_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """Normalises and rotates each head of q and k, and writes k and v of new tokens into the pages of a cache.

    This is `qk_norm_rope` and then `reshape_and_cache`, but k is rounded once, to the dtype of the cache. On `mps` this
    is one launch.

    Args:
        q: [B, T, HQ, D], bfloat16, float16 or float32. Any strides; copied if its last stride is not 1.
        k: [B, T, HK, D], q's dtype. Any strides; copied as q is.
        v: [B, T, HK, DV], q's dtype. Any strides; copied as q is.
        cos: [B, T, P], bfloat16, float16 or float32. See `qk_norm_rope`.
        sin: cos's shape and dtype.
        key_cache: [blocks, block_size, HK, D], bfloat16, float16 or float32. Written in place. The last stride must be
            1. Keys and values may share pages, as pages[..., :D] and pages[..., D:].
        value_cache: [blocks, block_size, HK, DV], key_cache's dtype. Written in place. The last stride must be 1.
        slot_mapping: [N], int32 or int64. The slot of each of the first N tokens of B * T: block * block_size + offset.
            N is at most B * T. k and v of a token with a negative slot, or without one, are not stored. No two tokens
            may have one slot. On q's device.
        q_weight: [D], bfloat16, float16 or float32. Default: q and k are rotated without a norm.
        k_weight: [D], q_weight's dtype. Default: None; there are two weights or none.
        eps: Added to the mean. With 0, a head of zeros returns NaN. Default: 1e-6.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next and Qwen3.5 do. Default: False.

    Returns:
        q_out: [B, T, HQ, D], q's dtype. Contiguous.

    Raises:
        ValueError: If there is one weight, or if zero_centered is set without weights. If a slot is not below
            blocks * block_size. On `mps`, such a slot raises a RuntimeError at the next synchronisation, and nothing is
            stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> k = torch.tensor([3.0, 0.0, 5.0, 1.0]).view(1, 1, 1, 4)
        >>> keys, values = torch.zeros(2, 16, 1, 8).chunk(2, dim=-1)
        >>> cos, sin, slots = torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([20])
        >>> q_out = torch_gdn.qk_norm_rope_and_cache_(k, k, k, cos, sin, keys, values, slots)
        >>> keys[1, 4], values[1, 4]
        (tensor([[0., 3., 5., 1.]]), tensor([[3., 0., 5., 1.]]))
    """
    found: Tensor = torch.ops.gdn.qk_norm_rope_and_cache_(
        q, k, v, cos, sin, key_cache, value_cache, slot_mapping, q_weight, k_weight, eps, zero_centered
    )
    return found
