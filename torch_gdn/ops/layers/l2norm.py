from __future__ import annotations

import torch
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum x^2 + eps) over the last dimension, computed in float32.

    FLA: `fla.modules.l2norm.l2norm`, without its `output_dtype`.

    Args:
        x: any shape, bfloat16, float16 or float32.
        eps: added to the sum of squares; with 0 a row of zeros gives NaN. Default: 1e-6.

    Returns:
        a tensor of x's shape and dtype.

    Raises:
        ValueError: x has no dimension, or eps is negative.
        TypeError: a dtype that is not as above.
        RuntimeError: x requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    y, _ = torch.ops.gdn.l2norm(x, eps)
    return y


def l2norm_fwd(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`l2norm`, and the factor that each row was multiplied by.

    FLA: `fla.modules.l2norm.l2norm_fwd`, without its `output_dtype`. Args and errors are those of `l2norm`.

    Returns:
        the normalised x, and rstd = rsqrt(sum x^2 + eps), float32, of x's shape without the last dimension.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.l2norm_fwd(torch.tensor([3.0, 4.0]))
        (tensor([0.6000, 0.8000]), tensor(0.2000))
    """
    return torch.ops.gdn.l2norm(x, eps, return_rstd=True)
