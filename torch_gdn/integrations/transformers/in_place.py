"""Decodes with the states of a transformers cache updated in place.

A layer of transformers passes the cache's state to the rule, and the cache overwrites it with the rule's result. If
that copy is certain to follow, the rule writes into the cache itself: one pass over the state instead of three.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from torch_gdn.integrations.transformers import decoding, dispatch, known_forms
from torch_gdn.integrations.transformers.calls import Bound
from torch_gdn.integrations.transformers.functions import CACHED_STATE
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

METHODS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")


def originals() -> dict[type, dict[str, Any]]:
    """Returns transformers' own methods, or none if they do not copy new states over the old ones."""
    owners = (Cache, LinearAttentionLayer) if copies_over() else ()
    return {owner: {name: vars(owner)[name] for name in METHODS if name in vars(owner)} for owner in owners}


def copies_over() -> bool:
    """Tries a layer of a cache: what it gives is what it holds, and it writes into the same tensor."""
    with known_forms.trial():
        layer, states = LinearAttentionLayer(), torch.randn(2, 1, 2, 4, 4)
        cache = Cache(layers=[layer])
        try:
            layer.has_previous_state[0] = True
            cache.update_recurrent_state(states[0], 0)
            held = layer.recurrent_states[0]
            cache.update_recurrent_state(states[1], 0)
            given = cache.get_recurrent_state(0) if hasattr(cache, "get_recurrent_state") else held
        except known_forms.ERRORS:
            return False
    return layer.recurrent_states[0] is held and given is held and torch.equal(held, states[1])


ORIGINALS = originals()


def forward_with_cached_state(
    bind: Callable[..., Bound],
    rule: Any,
    functions: Sequence[Any],
    original: Callable[..., Any],
    layer: Any,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Passes the state on. `rule` is the patch of the module's function that the layer calls. If it was rebound since,
    it may lack the option. `functions` are the patches of all functions that the layer calls.
    """
    cache = None if torch.is_grad_enabled() else kwargs.get(CACHE_NAMES.delta_net)
    if cache is not None and hidden_states.shape[1] == 1 and "layer_states" not in kwargs and rule.is_applied():
        state = overwritten_state(cache, layer.layer_idx)
        if state is not None and state.shape[0] == hidden_states.shape[0]:
            given, options, unknown = bind((layer, hidden_states, *args), kwargs)
            is_usual = not unknown and all(each.is_applied() for each in functions)
            held = decoding.cached_layer(*given, **options) if is_usual else None
            y = None if held is None else decode(layer, hidden_states, held.conv_states[0], state)
            if y is not None:
                return y
            if unknown and not torch.compiler.is_compiling() and not decoding.is_skipped(layer, hidden_states):
                dispatch.count(decoding.NAME, unknown)
            kwargs[CACHED_STATE] = state
    return dispatch.noting_layer(original, layer, hidden_states, *args, **kwargs)


def decode(layer: Any, hidden_states: Tensor, conv_state: Tensor, state: Tensor) -> Tensor | None:
    """Runs the whole layer at once, with both states in place, or returns None to call its functions one by one."""
    if type(conv_state) is not Tensor or conv_state.shape[0] != hidden_states.shape[0]:
        return None
    reason = decoding.decode_reason(layer, hidden_states, conv_state, state)
    y = None if reason else decoding.run_decode(layer, hidden_states, conv_state, state)
    if not torch.compiler.is_compiling():  # a graph that counts would be recompiled for each count
        if y is not None:
            dispatch.add_layer(layer)
        dispatch.count(decoding.NAME, reason or ("" if y is not None else "its projections have another dtype"))
    return y


def overwritten_state(cache: Any, layer_idx: int) -> Tensor | None:
    """Returns the state that the layer's call finally overwrites. Returns None if it may be kept, or another be
    written.
    """
    if not uses_their_code(cache, Cache):
        return None
    layer = cache.layers[layer_idx]
    if not uses_their_code(layer, LinearAttentionLayer) or layer.record_past:
        return None
    state: Tensor | None = layer.recurrent_states[0]
    return state if type(state) is Tensor and state.dtype == torch.float32 else None


def uses_their_code(holder: Any, owner: type) -> bool:
    """Returns whether transformers' own code returns and writes the states, which copies over the old ones."""
    return owner in ORIGINALS and all(
        getattr(type(holder), name, None) is original and name not in vars(holder)
        for name, original in ORIGINALS[owner].items()
    )
