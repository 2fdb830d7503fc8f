from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import KdaGate


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the log decay of each key channel from its projection: -exp(A_log) softplus(g + dt_bias).

    With lower_bound it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), which stays between lower_bound and 0.

    FLA: `fla.ops.kda.gate.fused_kda_gate`. With use_gate_in_kernel, the ops compute the same themselves.

    Args:
        g: [..., HV, K], any floating dtype. Any strides.
        A_log: HV elements in any shape, any floating dtype. Default: zeros.
        dt_bias: HV * K elements in any shape, any floating dtype. Default: zeros.
        lower_bound: A number below 0. Default: None, for the unbounded gate.
        output_dtype: Dtype of the result: bfloat16, float16 or float32. The arithmetic is in float32. Default: None,
            for float32.

    Returns:
        y: g's shape, output_dtype, or float32. Contiguous. A value depends neither on the others nor on its place in
            the tensor.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_kda_gate(torch.zeros(1, 2), torch.zeros(1), torch.tensor([0.0, 1.0]))
        tensor([[-0.6931, -1.3133]])
        >>> torch_gdn.fused_kda_gate(torch.tensor([[-30.0, 0.0, 30.0]]), lower_bound=-5.0)
        tensor([[-4.6788e-13, -2.5000e+00, -5.0000e+00]])
    """
    gate = KdaGate.apply if needs_grad(g, A_log, dt_bias) else torch.ops.gdn.fused_kda_gate
    log_decays: Tensor = gate(g, A_log, dt_bias, lower_bound, output_dtype)
    return log_decays
