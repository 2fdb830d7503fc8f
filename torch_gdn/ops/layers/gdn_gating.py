from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import GdnGating


def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes a layer's gates: the log decay g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b).

    FLA: `fla.ops.gated_delta_rule.gate`; vLLM: `fused_gdn_gating`. Both ops of the delta rule can compute the same
    gates themselves (use_gate_in_kernel, use_beta_sigmoid_in_kernel).

    Args:
        A_log: [HV], bfloat16, float16 or float32. Any strides.
        a: [..., HV], bfloat16, float16 or float32. Any strides.
        b: a's shape, bfloat16, float16 or float32. Any strides.
        dt_bias: [HV], bfloat16, float16 or float32. Default: zeros.
        allow_neg_eigval: Whether to double beta. Default: False.

    Returns:
        g: a's shape, float32.
        beta: a's shape, float32.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.gdn_gating(torch.zeros(1), torch.zeros(1), torch.zeros(1))
        (tensor([-0.6931]), tensor([0.5000]))
    """
    gating = GdnGating.apply if needs_grad(A_log, a, b, dt_bias) else torch.ops.gdn.gdn_gating
    return gating(A_log, a, b, dt_bias, allow_neg_eigval)


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Computes a layer's log decay from its projection: -exp(A_log) softplus(g + dt_bias).

    FLA: `fla.ops.gated_delta_rule.gate.fused_gdn_gate`. `gdn_gating` returns beta too.

    Args:
        g: [..., HV], bfloat16, float16 or float32. Any strides.
        A_log: [HV], bfloat16, float16 or float32. Any strides.
        dt_bias: [HV], bfloat16, float16 or float32. Default: zeros.
        output_dtype: bfloat16, float16 or float32. The arithmetic is in float32. Default: float32.

    Returns:
        log_decay: g's shape, output_dtype.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_gdn_gate(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]))
        tensor([-0.6931, -1.3133])
    """
    if output_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"fused_gdn_gate: output_dtype: expected bfloat16, float16 or float32, got {str(output_dtype)[6:]}"
        )
    decay: Tensor = gdn_gating(A_log, g, g, dt_bias)[0]
    return decay.to(output_dtype)
