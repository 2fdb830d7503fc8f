from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """The norm of a decoder layer's input, and the residual's sum before it: h * rsqrt(mean of h^2 + eps) * weight.

    FLA: `fla.modules.layernorm.rms_norm`, without bias and dropout. h = x + residual in float32, and the norm is of
    that sum before it is rounded, as in FLA and vLLM.

    Args:
        x: [..., D], bfloat16, float16 or float32, D up to 16384. Any strides; a last stride other than 1 costs a copy,
            and so do more than 4 dimensions that are not contiguous.
        weight: [D], any of these dtypes. Default: ones.
        bias: None: the norm has none. Default: None.
        residual: of x's shape and dtype, any strides. Default: zeros.
        eps: added to the mean; with 0 a row of zeros gives NaN. Default: 1e-6.
        prenorm: whether h is returned too, the residual of the next layer. Default: False.
        zero_centered: whether the factor is 1 + weight, as in Qwen3-Next, Qwen3.5 and Gemma. Default: False.
        round_norm: whether the normalised h is rounded to x's dtype before it is multiplied with the weight, as
            transformers' Llama does. Default: False.

    Returns:
        y, of x's shape and dtype, contiguous; with prenorm y and h, which is x itself without a residual.

    Raises:
        ValueError: a shape, D or eps that is not as above; a bias; zero_centered without a weight.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm(torch.tensor([1.0, 4.0]), residual=torch.tensor([2.0, 0.0]), prenorm=True)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if bias is not None:
        raise ValueError(f"rms_norm: bias: expected None, got a tensor of shape {list(bias.shape)}")
    y, h = torch.ops.gdn.rms_norm(x, weight, residual, eps, zero_centered, round_norm)
    if not prenorm:
        return y
    return y, x if residual is None else h
