from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.common import compute_dtype


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum x^2 + eps) over the last dimension."""
    upcast = x.to(compute_dtype(x))
    return (upcast * torch.rsqrt(upcast.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
