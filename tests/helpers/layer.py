"""A Gated DeltaNet layer as transformers writes one, on torch_gdn's functions, for tests of torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torch_gdn
from torch_gdn.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

H, HV, K, V, W, HIDDEN = 1, 2, 16, 24, 4, 32
CHANNELS = 2 * H * K + HV * V
KERNELS = ("causal_conv1d", "gdn_gating", "rms_norm_gated")  # every layer runs these, and a rule


class Layer(nn.Module):
    """A layer with projections, convolution, gates, rule and gated norm. One token runs the recurrent op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, CHANNELS + HV * V, bias=False)
        self.project_gates = nn.Linear(HIDDEN, 2 * HV, bias=False)
        self.convolution = nn.Conv1d(CHANNELS, CHANNELS, W, groups=CHANNELS, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HV)), nn.Parameter(torch.ones(HV))
        self.norm = nn.Parameter(torch.ones(V))
        self.output = nn.Linear(HV * V, HIDDEN, bias=False)

    def forward(self, x: Tensor, columns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Takes x [B, T, HIDDEN], columns [B, CHANNELS, W], which it updates in place, and state [B, HV, K, V]. Returns
        a new state.
        """
        batch, tokens, _ = x.shape
        mixed, z = self.project(x).split([CHANNELS, HV * V], dim=-1)
        weight = self.convolution.weight.squeeze(1)
        if tokens == 1:
            mixed = causal_conv1d_update(mixed.transpose(1, 2), columns, weight, None, "silu")
        else:
            mixed = causal_conv1d_fn(
                mixed.transpose(1, 2), weight, None, None, columns, True, columns, activation="silu"
            )[0]
        q, k, v = mixed.transpose(1, 2).split([H * K, H * K, HV * V], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, size)) for each, size in ((q, K), (k, K), (v, V)))
        a, b = self.project_gates(x).chunk(2, dim=-1)
        g, beta = torch_gdn.gdn_gating(self.A_log, a, b, self.dt_bias)
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if tokens == 1:
            o, new_state = torch_gdn.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **options)
        else:
            o, new_state = torch_gdn.chunk_gated_delta_rule(q, k, v, g, beta, **options)
        gated = torch_gdn.rms_norm_gated(o, z.view(batch, tokens, HV, V), self.norm, eps=1e-5, round_norm=True)
        return self.output(gated.flatten(2)), new_state


class Served(Layer):
    """A layer with pools of states, both updated in place. One call does prefill or decoding."""

    def forward(  # type: ignore[override]
        self, x: Tensor, columns: Tensor, states: Tensor, indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, and updates both pools."""
        mixed, _ = self.project(x).split([CHANNELS, HV * V], dim=-1)
        before = columns.sum() + states.sum()
        weight = self.convolution.weight.squeeze(1)
        mixed = torch_gdn.causal_conv1d_update_(mixed, weight, columns, indices, activation="silu")
        q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, size)) for each, size in ((q, K), (k, K), (v, V)))
        a, b = self.project_gates(x).chunk(2, dim=-1)
        g, beta = torch_gdn.gdn_gating(self.A_log, a, b, self.dt_bias)
        arguments = (q, k, v, g, beta, states, indices)
        if x.shape[1] == 1:
            o = torch.ops.gdn.fused_recurrent_gated_delta_rule_(*arguments, use_qk_l2norm_in_kernel=True)
        else:
            o, _ = torch.ops.gdn.chunk_gated_delta_rule_(*arguments, use_qk_l2norm_in_kernel=True)
        return self.output(o.flatten(2)), columns.sum() + states.sum() - before


def between_projections(x: Tensor, weight: Tensor, shape: tuple[int, int, int, int], **options: Any) -> Tensor:
    """Runs a Gated DeltaNet layer between its projections. x is [1, T, channels]."""
    H, HV, K, V = shape
    T = x.shape[1]
    mixed, _ = torch_gdn.causal_conv1d(x, weight, activation="silu")
    heads = mixed.split([H * K, H * K, HV * V], dim=-1)
    q, k, v = (part.view(1, T, -1, size) for part, size in zip(heads, (K, K, V), strict=True))
    a = mixed[..., :HV]
    g, beta = torch_gdn.gdn_gating(torch.zeros(HV, device=x.device), a, a)
    op = torch_gdn.fused_recurrent_gated_delta_rule if T == 1 else torch_gdn.chunk_gated_delta_rule
    o, _ = op(q, k, v, g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True, **options)
    return torch_gdn.rms_norm_gated(o, o, mixed[0, 0, :V].clone())


def inputs(tokens: int, device: torch.device, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, columns and state."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, tokens, HIDDEN), (batch, CHANNELS, W), (batch, HV, K, V))
    x, columns, state = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return x, columns, state


def layer_on(device: torch.device, kind: type[Layer] = Layer) -> Layer:
    torch.manual_seed(0)
    return kind().to(device).eval().requires_grad_(False)
