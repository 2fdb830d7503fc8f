from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import L2Norm


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalises the last dimension: x * rsqrt(sum x^2 + eps), computed in float32.

    FLA: `fla.modules.l2norm.l2norm`, without its `output_dtype`.

    Args:
        x: [..., D], bfloat16, float16 or float32.
        eps: Added to the sum of squares. With 0, a row of zeros returns NaN. Default: 1e-6.

    Returns:
        y: x's shape and dtype.

    Raises:
        ValueError: If x has no dimension, or if eps is negative.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    y: Tensor = L2Norm.apply(x, eps) if needs_grad(x) else torch.ops.gdn.l2norm(x, eps)[0]
    return y


def l2norm_fwd(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Returns what `l2norm` does, and the factor by which it multiplied each row. It raises the same errors.

    FLA: `fla.modules.l2norm.l2norm_fwd`, without its `output_dtype`.

    Args:
        x, eps: See `l2norm`.

    Returns:
        y: x's shape and dtype.
        rstd: [...], float32. The factor rsqrt(sum x^2 + eps).

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm_fwd(torch.tensor([3.0, 4.0]))
        (tensor([0.6000, 0.8000]), tensor(0.2000))
    """
    return torch.ops.gdn.l2norm(x, eps, return_rstd=True)
