from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import compute_dtype


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "silu",
    round_norm: bool = False,
) -> Tensor:
    """x * rsqrt(mean x^2 + eps) * weight * silu(g) over the last dimension, or sigmoid(g).

    `round_norm`: the normalised x is rounded to x's dtype, its product with the weight to the dtype of both.
    """
    dtype = compute_dtype(x)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if round_norm:
        y = y.to(x.dtype)
    if weight is not None:
        y = weight * y if round_norm else weight.to(dtype) * y
    g = g.to(dtype)
    return (y * (g.sigmoid() if activation == "sigmoid" else g * g.sigmoid())).to(x.dtype)
