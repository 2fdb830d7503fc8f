"""What the delta rule's op would refuse of Kimi Delta Attention's gates in words of its own arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def check_gates(
    function: str,
    q: Tensor,
    v: Tensor,
    g: Tensor,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> None:
    """Of g [B, T, HV, K] and its gate; the other arguments are the op's to check."""
    if q.dim() == v.dim() == 4 and g.shape != (*v.shape[:3], q.shape[3]):
        expected = [*v.shape[:3], q.shape[3]]
        raise ValueError(f"{function}: g: expected shape [B, T, HV, K] = {expected}, got {list(g.shape)}")
    check_gate_input(function, "g", g, "[B, T, HV, K]", g.numel())
    if not use_gate_in_kernel:
        return
    if A_log is None and lower_bound is None:
        raise ValueError(
            f"{function}: A_log: expected a tensor where use_gate_in_kernel is set without lower_bound, got None"
        )
    check_channel_gate(function, g, A_log, dt_bias, lower_bound)


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
