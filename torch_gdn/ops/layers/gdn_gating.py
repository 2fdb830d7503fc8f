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


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The log decay of a layer from its projection: -exp(A_log) softplus(g + dt_bias).

    FLA: `fla.ops.gated_delta_rule.gate.fused_gdn_gate`. `gdn_gating` gives beta too.

    Args:
        g: [..., HV], bfloat16, float16 or float32, any strides.
        A_log: [HV], any of these dtypes, any strides.
        dt_bias: [HV], any of these dtypes. Default: zeros.
        output_dtype: any of these dtypes; the computation is in float32. Default: float32.

    Returns:
        a tensor of g's shape.

    Raises:
        ValueError: a shape or device that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_gdn_gate(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]))
        tensor([-0.6931, -1.3133])
    """
    if output_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"fused_gdn_gate: output_dtype: expected bfloat16, float16 or float32, got {str(output_dtype)[6:]}"
        )
    decay: Tensor = torch.ops.gdn.gdn_gating(A_log, g, g, dt_bias, False)[0]
    return decay.to(output_dtype)
