from __future__ import annotations

import torch
from torch import Tensor


def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """The gates of a layer: g = -exp(A_log) softplus(a + dt_bias), the log decay, and beta = sigmoid(b).

    FLA: `fla.ops.gated_delta_rule.gate`; vLLM: `fused_gdn_gating`. Both ops of the rule can do this themselves
    (use_gate_in_kernel, use_beta_sigmoid_in_kernel).

    Args:
        A_log: [HV], bfloat16, float16 or float32, any strides.
        a: [..., HV], any of these dtypes, any strides.
        b: of a's shape, any of these dtypes, any strides.
        dt_bias: [HV], any of these dtypes. Default: zeros.
        allow_neg_eigval: beta is doubled. Default: False.

    Returns:
        g and beta, float32, of a's shape.

    Raises:
        ValueError: a shape or device that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.gdn_gating(torch.zeros(1), torch.zeros(1), torch.zeros(1))
        (tensor([-0.6931]), tensor([0.5000]))
    """
    return torch.ops.gdn.gdn_gating(A_log, a, b, dt_bias, allow_neg_eigval)
