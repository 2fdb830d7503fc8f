from __future__ import annotations

import torch
from torch import Tensor


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
