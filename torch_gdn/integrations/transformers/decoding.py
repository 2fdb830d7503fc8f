"""Decodes a Gated DeltaNet layer's token on mps: its projections, and between them `gdn_decode_` in two launches.

Qwen3-Next's layer has two projections by key head; that of Qwen3.5 and Qwen4-Exp has four. Both states are updated in
the cache; in_place.py says when that is possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.integrations.transformers.functions import Function, common_reason, gate_activation, self_test_reason
from torch_gdn.integrations.transformers.refusal import Sizes, is_plain, kept, meta, refused

NAME = "gdn_decode"
BY_KEY_HEAD, ONE_BY_ONE = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
OTHERS = ("conv1d", "norm", "out_proj", "A_log", "dt_bias")
Known = tuple[Sizes, torch.dtype]


def projections_of(layer: Any) -> tuple[str, ...]:
    """Returns the names of the layer's input projections, or an empty tuple for a layer of another form."""
    for names in (BY_KEY_HEAD, ONE_BY_ONE):
        if all(hasattr(layer, name) for name in (*names, *OTHERS)):
            return names
    return ()


def is_elsewhere(layer: Any, hidden_states: Tensor, *others: Any) -> bool:
    """Returns whether the layer's functions are called one by one."""
    return hidden_states.device.type != "mps" or not projections_of(layer)


def decode_reason(layer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> str:
    for module in (layer.conv1d, layer.norm):
        if not is_plain(module):
            return f"a hook of {type(module).__name__} must be called"
    weight, norm = layer.conv1d.weight, layer.norm.weight
    tensors = (hidden_states, conv_state, state, weight, norm, layer.A_log, layer.dt_bias)
    return (
        common_reason(*tensors)
        or self_test_reason("gdn_decode_", hidden_states.device)
        or decode_refusal(
            hidden_states.dtype,
            (conv_state.shape[1:], conv_state.dtype),
            (state.shape[1:], state.dtype),
            (weight.shape, weight.dtype),
            None if layer.conv1d.bias is None else layer.conv1d.bias.dtype,
            (norm.shape, norm.dtype),
            (layer.activation, gate_activation(layer.norm)),
        )
    )


@kept
def decode_refusal(
    dtype: torch.dtype,
    conv_state: Known,
    state: Known,
    weight: Known,
    bias: torch.dtype | None,
    norm: Known,
    activations: tuple[str, str],
) -> str:
    """`conv_state` and `state` without their batch, `weight` as [D, 1, W], both activations."""
    D, heads, values = weight[0][0], state[0][0], state[0][2]
    qkv, z, gates = (meta((1, 1, size), dtype) for size in (D, heads * values, heads))
    return refused(
        "gdn_decode_",
        qkv=qkv,
        z=z,
        b=gates,
        a=gates,
        conv_weight=meta((D, weight[0][2]), weight[1]),
        conv_pool=meta((1, *conv_state[0]), conv_state[1]),
        A_log=meta((heads,), torch.float32),
        dt_bias=None,
        state_pool=meta((1, *state[0]), state[1]),
        norm_weight=meta(*norm),
        conv_bias=None if bias is None else meta((D,), bias),
        activation=activations[0],
        norm_activation=activations[1],
    )


def run_decode(layer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> Tensor:
    projected = [getattr(layer, name)(hidden_states) for name in projections_of(layer)]
    qkv, z, b, a = projected if len(projected) == 4 else (projected[0], None, projected[1], None)
    o: Tensor = torch.ops.gdn.gdn_decode_(
        qkv,
        z,
        b,
        a,
        layer.conv1d.weight[:, 0],
        conv_state,
        layer.A_log,
        layer.dt_bias,
        state,
        layer.norm.weight,
        conv_bias=layer.conv1d.bias,
        activation=layer.activation,
        norm_activation=gate_activation(layer.norm),
        norm_eps=layer.norm.variance_epsilon,
        round_norm=True,
    )
    y: Tensor = layer.out_proj(o.flatten(2))
    return y


FUNCTIONS = {NAME: Function(decode_reason, run_decode, is_elsewhere)}
