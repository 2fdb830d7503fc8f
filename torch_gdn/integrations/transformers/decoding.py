"""Decodes a Gated DeltaNet layer's token on mps: its projections, and between them `gdn_decode_` in two launches.

Qwen3-Next's layer has two projections by key head. Qwen3.5's and Qwen4-Exp's have four. OLMo-Hybrid's has six, and
another launch joins its q, k and v. Both states are updated in the cache; in_place.py says when that is possible.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import known_forms
from torch_gdn.integrations.transformers.calls import Binder, Bound
from torch_gdn.integrations.transformers.functions import (
    Function,
    are_alike,
    common_reason,
    gate_activation,
    gated_norms,
    narrowing_reason,
    self_test_reason,
)
from torch_gdn.integrations.transformers.refusal import form, refusal_of
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

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
layers: set[type] = set()  # classes of layers that enable() knows
forms: dict[type, Form | None] = {}  # theirs


def form_of(layer: Any) -> Form | None:
    """Returns the form of a known class's layers."""
    kind = type(layer)
    if kind in layers and kind not in forms:
        names = [(form, (*form.inputs, form.norm, form.output, *OTHERS)) for form in FORMS]
        forms[kind] = next((form for form, parts in names if all(hasattr(layer, name) for name in parts)), None)
    return forms.get(kind)


def is_skipped(layer: Any, hidden_states: Tensor, *others: Any) -> bool:
    """Returns whether the layer's functions are called one by one."""
    return known_forms.runs_elsewhere(hidden_states.device) or form_of(layer) is None


def cached_layer(
    layer: Any,
    hidden_states: Tensor,
    /,
    kv_cache: Any,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Any:
    """Returns the cache's layer, or None if the call masks or packs tokens, or its functions are called one by one."""
    others = (attention_mask, cu_seq_lens_q, seq_idx)
    is_plain = all(x is None for x in others) and not is_skipped(layer, hidden_states)
    return kv_cache.layers[layer.layer_idx] if is_plain else None


def binder_of(kind: Any) -> Callable[..., Bound]:
    """Returns what binds calls of a layer class's forward to `cached_layer`."""
    return Binder(cached_layer, kind.forward, {CACHE_NAMES.delta_net: "kv_cache"}).bind


def decode_reason(layer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> str:
    form = form_of(layer)
    assert form is not None
    gated_norm = getattr(layer, form.norm)
    if change := (
        layer_change(layer)
        or plain.change_of(layer.conv1d, plain.CONVOLUTIONS)
        or plain.change_of(gated_norm, gated_norms)
    ):
        return change
    weight, norm = layer.conv1d.weight, gated_norm.weight
    tensors = (hidden_states, conv_state, state, weight, layer.conv1d.bias, norm, layer.A_log, layer.dt_bias)
    return (
        narrowing_reason(hidden_states, weight)
        or common_reason(*tensors)
        or self_test_reason("gdn_decode_", hidden_states.device)
        or decode_refusal(layer, gated_norm, hidden_states.dtype, conv_state, state)
    )


def layer_change(layer: Any) -> str:
    kind = type(layer)
    return plain.change_of_itself(layer, kind) if kind in layers else f"torch_gdn does not know {kind.__name__}"


def decode_refusal(layer: Any, norm: Any, dtype: torch.dtype, conv_state: Tensor, state: Tensor) -> str:
    weight = layer.conv1d.weight  # [D, 1, W]
    (D, _, W), heads, values = weight.shape, state.shape[1], state.shape[3]
    qkv, z, gates = (((1, 1, size), dtype) for size in (D, heads * values, heads))
    return refusal_of(
        "gdn_decode_",
        qkv=qkv,
        z=z,
        b=gates,
        a=gates,
        conv_weight=((D, W), weight.dtype),
        conv_pool=form(conv_state, 1, 1),
        A_log=((heads,), torch.float32),
        dt_bias=None,
        state_pool=form(state, 1, 1),
        norm_weight=form(norm.weight),
        conv_bias=form(layer.conv1d.bias),
        activation=layer.activation,
        norm_activation=gate_activation(norm),
    )


def run_decode(
    layer: Any,
    hidden_states: Tensor,
    conv_state: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor | None:
    """Returns None, before it has written a state, if the projections are not what their classes promise.

    `state_indices` and `num_accepted_tokens` are `gdn_decode_`'s, for a step of drafts.
    """
    form = form_of(layer)
    assert form is not None
    norm = getattr(layer, form.norm)
    projected = [getattr(layer, name)(hidden_states) for name in form.inputs]
    if not are_alike(hidden_states, *projected):
        return None
    o: Tensor = torch.ops.gdn.gdn_decode_(
        *in_order(projected),
        layer.conv1d.weight[:, 0],
        conv_state,
        layer.A_log,
        layer.dt_bias,
        state,
        norm.weight,
        state_indices,
        num_accepted_tokens=num_accepted_tokens,
        conv_bias=layer.conv1d.bias,
        activation=layer.activation,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        norm_activation=gate_activation(norm),
        norm_eps=norm.variance_epsilon,
        round_norm=True,
    )
    y: Tensor = getattr(layer, form.output)(o.flatten(2))
    return y


def in_order(projected: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns qkv, z, b and a, as `gdn_decode_` takes them."""
    if len(projected) == 2:
        return projected[0], None, projected[1], None
    *qkv, z, b, a = projected
    return qkv[0] if len(qkv) == 1 else torch.cat(qkv, -1), z, b, a


FUNCTIONS = {NAME: Function(decode_reason, run_decode, is_skipped)}
