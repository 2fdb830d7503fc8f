from __future__ import annotations

import torch
from torch import Tensor


def moe_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies tokens with a router's weight in float32: router_logits = x Wᵀ.

    DeepSeek-V3's router computes its logits so, whatever the model's dtype is: transformers copies x and the weight to
    float32 first. Products of 16-bit numbers are exact in float32, so without the copies the logits are as close. On
    `mps` this is one launch. `moe_router` takes the logits.

    Args:
        x: [T, D], bfloat16, float16 or float32. Copied if the last stride is not 1.
        weight: [E, D], x's dtype. The last stride must be 1.

    Returns:
        router_logits: [T, E], float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.moe_logits(torch.ones(1, 2, dtype=torch.bfloat16), torch.eye(3, 2, dtype=torch.bfloat16))
        tensor([[1., 1., 0.]])
    """
    return torch.ops.gdn.moe_logits(x, weight)
