from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import RmsNormGated


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> Tensor:
    """Normalises a layer's output and multiplies it by its gate: x * rsqrt(mean of x^2 + eps) * weight * silu(g).

    FLA: `fla.modules.fused_norm_gate.rms_norm_gated`, without residual and bias. Like FLA's `FusedRMSNormGated` and
    vLLM's norm, it computes in float32 and rounds once. transformers' `Qwen3NextRMSNormGated` rounds twice more: see
    round_norm.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is at most 1024. Any strides. x is copied if its last stride is not
            1, or if it has more than 4 dimensions and is not contiguous.
        g: x's shape, bfloat16, float16 or float32. The gate. Any strides.
        weight: [D], bfloat16, float16 or float32. Default: ones.
        bias: None. The norm has no bias.
        activation: The gate's activation: "silu", its synonym "swish", or "sigmoid". Default: "silu".
        eps: Added to the mean. With 0, a row of zeros returns NaN. FLA's layer has 1e-5. Default: 1e-6.
        round_norm: Whether to round the normalised x to x's dtype before the weight, and the product to the dtype of
            both, as transformers does. Default: False.

    Returns:
        y: x's shape and dtype. Contiguous.

    Raises:
        ValueError: If there is a bias.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm_gated(torch.tensor([3.0, 4.0]), torch.tensor([100.0, 0.0]))
        tensor([84.8528,  0.0000])
    """
    if bias is not None:
        raise ValueError(f"rms_norm_gated: bias: expected None, got a tensor of shape {list(bias.shape)}")
    norm = RmsNormGated.apply if needs_grad(x, g, weight) else torch.ops.gdn.rms_norm_gated
    return norm(x, g, weight, activation, eps, round_norm)
