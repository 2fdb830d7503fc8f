from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The log decay of each key channel from its projection: -exp(A_log) softplus(g + dt_bias).

    With lower_bound it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), which stays between lower_bound and 0.

    FLA: `fla.ops.kda.gate.fused_kda_gate`. Made of PyTorch's own functions, several launches on `mps`.

    Args:
        g: [..., HV, K], any floating dtype, any strides.
        A_log: HV values of any shape, any floating dtype. Default: zeros.
        dt_bias: HV * K values of any shape, any floating dtype. Default: zeros.
        lower_bound: below 0. Default: None, for the unbounded gate.
        output_dtype: bfloat16, float16 or float32; the computation is in float32. Default: float32.

    Returns:
        a tensor of g's shape.

    Raises:
        ValueError: a shape or lower_bound that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.fused_kda_gate(torch.zeros(1, 2), torch.zeros(1), torch.tensor([0.0, 1.0]))
        tensor([[-0.6931, -1.3133]])
        >>> torch_gdn.fused_kda_gate(torch.tensor([[-30.0, 0.0, 30.0]]), lower_bound=-5.0)
        tensor([[-4.6788e-13, -2.5000e+00, -5.0000e+00]])
    """
    if output_dtype not in OUTPUT_DTYPES:
        raise TypeError(
            f"fused_kda_gate: output_dtype: expected bfloat16, float16 or float32, got {str(output_dtype)[6:]}"
        )
    check_channel_gate("fused_kda_gate", g, A_log, dt_bias, lower_bound)
    return log_decay(g, A_log, dt_bias, lower_bound).to(output_dtype)


def check_channel_gate(
    function: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> None:
    """Errors are in the function's name."""
    if g.dim() < 2:
        raise ValueError(f"{function}: g: expected [..., HV, K], got {g.dim()} dimensions")
    heads, channels = g.shape[-2:]
    for name, x, pattern, size in (
        ("g", g, "[..., HV, K]", g.numel()),
        ("A_log", A_log, "HV", heads),
        ("dt_bias", dt_bias, "HV * K", heads * channels),
    ):
        if x is not None:
            check_gate_input(function, name, x, pattern, size)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{function}: lower_bound: expected None or a number below 0, got {lower_bound}")


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    heads, channels = g.shape[-2:]
    x = g.float()
    if dt_bias is not None:
        x = x + dt_bias.float().reshape(heads, channels)
    rate = None if A_log is None else A_log.float().reshape(heads, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if rate is None else rate * x)
    return -softplus(x) if rate is None else -rate * softplus(x)


def check_gate_input(function: str, name: str, x: Tensor, pattern: str, size: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{function}: {name}: expected a floating dtype, got {str(x.dtype)[6:]}")
    if x.numel() != size:
        raise ValueError(f"{function}: {name}: expected {pattern} = {size} values, got {list(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{function}: {name}: expected a tensor that does not require grad (the op has no backward; use "
            "torch.no_grad() or detach()), got one that does"
        )
