"""Decodes a Gated DeltaNet layer's token on mps: its projections, and between them `gdn_decode_` in two launches.

Qwen3-Next's layer has two projections by key head. Qwen3.5's and Qwen4-Exp's have four. OLMo-Hybrid's has six, and
another launch joins its q, k and v. Both states are updated in the cache; in_place.py says when that is possible.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_gdn.integrations.transformers import known_forms
from torch_gdn.integrations.transformers.functions import Function, common_reason, gate_activation, self_test_reason
from torch_gdn.integrations.transformers.refusal import Sizes, is_plain, kept, meta, refused

NAME = "gdn_decode"
OTHERS = ("conv1d", "A_log", "dt_bias")


class Form(NamedTuple):
    """The names of a layer's parts."""

    inputs: tuple[str, ...]  # the names of its input projections
    norm: str = "norm"
    output: str = "out_proj"


FORMS = (
    Form(("in_proj_qkvz", "in_proj_ba")),
    Form(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    Form(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),
)
Known = tuple[Sizes, torch.dtype]


def form_of(layer: Any) -> Form | None:
    for form in FORMS:
        if all(hasattr(layer, name) for name in (*form.inputs, form.norm, form.output, *OTHERS)):
            return form
    return None


def is_elsewhere(layer: Any, hidden_states: Tensor, *others: Any) -> bool:
    """Returns whether the layer's functions are called one by one."""
    return known_forms.runs_elsewhere(hidden_states.device) or form_of(layer) is None


def decode_reason(layer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> str:
    form = form_of(layer)
    assert form is not None
    gated_norm = getattr(layer, form.norm)
    for module in (layer.conv1d, gated_norm):
        if not is_plain(module):
            return f"a hook of {type(module).__name__} must be called"
    weight, norm = layer.conv1d.weight, gated_norm.weight
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
            (layer.activation, gate_activation(gated_norm)),
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
    """Returns why the op would refuse. `conv_state` and `state` have no batch, `weight` is [D, 1, W], and both
    activations are given.
    """
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
    form = form_of(layer)
    assert form is not None
    norm = getattr(layer, form.norm)
    o: Tensor = torch.ops.gdn.gdn_decode_(
        *project(layer, form, hidden_states),
        layer.conv1d.weight[:, 0],
        conv_state,
        layer.A_log,
        layer.dt_bias,
        state,
        norm.weight,
        conv_bias=layer.conv1d.bias,
        activation=layer.activation,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        norm_activation=gate_activation(norm),
        norm_eps=norm.variance_epsilon,
        round_norm=True,
    )
    y: Tensor = getattr(layer, form.output)(o.flatten(2))
    return y


def project(layer: Any, form: Form, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns qkv, z, b and a, as `gdn_decode_` takes them."""
    projected = [getattr(layer, name)(hidden_states) for name in form.inputs]
    if len(projected) == 2:
        return projected[0], None, projected[1], None
    *qkv, z, b, a = projected
    return qkv[0] if len(qkv) == 1 else torch.cat(qkv, -1), z, b, a


FUNCTIONS = {NAME: Function(decode_reason, run_decode, ("gdn_decode_",), is_elsewhere)}
