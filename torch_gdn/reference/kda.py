"""Kimi Delta Attention ("Kimi Linear", Kimi Team, 2025): the delta rule with a decay for each key channel."""

import torch
from torch import Tensor

from torch_gdn.reference.common import compute_dtype, gradients
from torch_gdn.reference.gdn import fused_recurrent_gated_delta_rule

__all__ = ["fused_kda_gate", "fused_kda_gate_bwd", "fused_recurrent_kda"]


def fused_kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Gives -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)). g is [..., HV, K]."""
    heads, channels = g.shape[-2:]
    x = g.to(compute_dtype(g))
    rate = x.new_ones(heads, 1) if A_log is None else A_log.to(x.dtype).exp().view(heads, 1)
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(heads, channels)
    if lower_bound is not None:
        # This is the sigmoid, with an exact gradient where it is almost 1.
        return lower_bound * torch.exp(-torch.logaddexp(-rate * x, torch.zeros_like(x)))
    return -rate * torch.logaddexp(x, torch.zeros_like(x))


def fused_kda_gate_bwd(
    dy: Tensor, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of g, A_log [HV] and dt_bias [HV * K] in `fused_kda_gate`."""

    def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
        return fused_kda_gate(g, A_log, dt_bias, lower_bound)

    dg, dA_log, ddt_bias = gradients(gate, (g, A_log, dt_bias), (dy,))
    return dg, None if dA_log is None else dA_log.flatten(), None if ddt_bias is None else ddt_bias.flatten()


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, head_grouping: str = "block",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes the rule as defined, token by token. g [B, T, HV, K] is the log decay of each row of the state."""
    return fused_recurrent_gated_delta_rule(
        *(q, k, v, None, beta, scale, initial_state, output_final_state),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        gk=fused_kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        head_grouping=head_grouping,
    )
