"""What the delta rule's op would refuse of Kimi Delta Attention's gates in words of its own arguments."""

from __future__ import annotations

from torch import Tensor

from torch_gdn.ops.kda.fused_kda_gate import check_channel_gate, check_gate_input


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
