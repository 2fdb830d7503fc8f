from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    *,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> Tensor:
    """The norm of a layer's output, and its gate: x * rsqrt(mean of x^2 + eps) * weight * silu(g).

    FLA: `fla.modules.fused_norm_gate.rms_norm_gated`, without residual and bias. Its `FusedRMSNormGated` and vLLM's
    compute as this does, in float32 with one rounding at the end; transformers' `Qwen3NextRMSNormGated` rounds twice
    more: see round_norm.

    Args:
        x: [..., D], bfloat16, float16 or float32, D up to 1024. Any strides; a last stride other than 1 costs a copy,
            and so do more than 4 dimensions that are not contiguous.
        g: the gate, of x's shape, any of these dtypes, any strides.
        weight: [D], any of these dtypes. Default: ones.
        bias: None: the norm has none. Default: None.
        activation: "silu" ("swish" is the same) or "sigmoid", of the gate. Default: "swish".
        eps: added to the mean; with 0 a row of zeros gives NaN. Default: 1e-6; FLA's layer has 1e-5.
        round_norm: whether the normalised x is rounded to x's dtype before it is multiplied with the weight, and the
            product to the dtype of both, as transformers does. Default: False.

    Returns:
        a tensor of x's shape and dtype, contiguous.

    Raises:
        ValueError: a shape, D, eps or activation that is not as above; a bias.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.rms_norm_gated(torch.tensor([3.0, 4.0]), torch.tensor([100.0, 0.0]))
        tensor([84.8528,  0.0000])
    """
    if bias is not None:
        raise ValueError(f"rms_norm_gated: bias: expected None, got a tensor of shape {list(bias.shape)}")
    return torch.ops.gdn.rms_norm_gated(x, g, weight, eps, activation, round_norm)
