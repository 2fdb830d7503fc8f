from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import RmsNorm


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    *,
    zero_centered: bool = False,
    round_norm: bool = False,
) -> Any:
    """Adds the residual and normalises the sum h = x + residual: h * rsqrt(mean of h^2 + eps) * weight.

    FLA: `fla.modules.layernorm.rms_norm`, without bias and dropout. Both h and its norm are computed in float32; h is
    not rounded before the norm, as in FLA and vLLM.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is at most 16384. Any strides. x is copied if its last stride is
            not 1, or if it has more than 4 dimensions and is not contiguous.
        weight: [D], bfloat16, float16 or float32. Default: ones.
        bias: None. The norm has no bias.
        residual: x's shape and dtype. Any strides. Default: zeros.
        eps: Added to the mean. With 0, a row of zeros returns NaN. Default: 1e-6.
        prenorm: Whether to return h too, which is the residual of the next layer. Default: False.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next, Qwen3.5 and Gemma do. Default: False.
        round_norm: Whether to round the normalised h to x's dtype before the weight, as transformers' Llama does.
            Default: False.

    Returns:
        y: x's shape and dtype. Contiguous.
        residual_out: x's shape and dtype; only with prenorm. This is h, or x itself without a residual.

    Raises:
        ValueError: If there is a bias, or if zero_centered is set without a weight.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm(torch.tensor([1.0, 4.0]), residual=torch.tensor([2.0, 0.0]), prenorm=True)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if bias is not None:
        raise ValueError(f"rms_norm: bias: expected None, got a tensor of shape {list(bias.shape)}")
    norm = RmsNorm.apply if needs_grad(x, weight, residual) else torch.ops.gdn.rms_norm
    y, h = norm(x, weight, residual, eps, zero_centered, round_norm)
    if not prenorm:
        return y
    return y, x if residual is None else h
