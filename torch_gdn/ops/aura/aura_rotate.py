from __future__ import annotations

import torch
from torch import Tensor


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
