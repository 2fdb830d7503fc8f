"""Decodes with the states of a transformers cache updated in place.

A layer of transformers passes the cache's state to the rule, and the cache overwrites it with the rule's result. If
that copy is certain to follow, the rule writes into the cache itself: one pass over the state instead of three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from torch_gdn.integrations.transformers import decoding, dispatch, layers_run
from torch_gdn.integrations.transformers.functions import CACHED_STATE

METHODS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
NOT_DECODED = ("attention_mask", "cu_seq_lens_q", "seq_idx")  # arguments that `decode` does not take
THEIRS = {
    owner: {name: vars(owner)[name] for name in METHODS if name in vars(owner)}
    for owner in (Cache, LinearAttentionLayer)
}


def forward_with_cached_state(original: Callable[..., Any], rule: Any, functions: Sequence[Any]) -> Callable[..., Any]:
    """Passes the state on. `rule` is the patch of the module's function that the layer calls. If it was rebound since,
    it may lack the option. `functions` are the patches of all functions that the layer calls.
    """

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return original(layer, hidden_states, *args, **kwargs)
        cache = kwargs.get("cache_params")
        if cache is not None and hidden_states.shape[1] == 1 and "layer_states" not in kwargs and rule.is_applied():
            state = overwritten_state(cache, layer.layer_idx)
            if state is not None and state.shape[0] == hidden_states.shape[0]:
                is_usual = not args and all(kwargs.get(name) is None for name in NOT_DECODED)
                is_usual = is_usual and all(each.is_applied() for each in functions)
                y = decode(layer, hidden_states, cache, state) if is_usual else None
                if y is not None:
                    return y
                kwargs[CACHED_STATE] = state
        return original(layer, hidden_states, *args, **kwargs)

    return layers_run.noting_layer(forward)


def decode(layer: Any, hidden_states: Tensor, cache: Any, state: Tensor) -> Tensor | None:
    """Runs the whole layer at once, with both states in place, or returns None to call its functions one by one."""
    if decoding.is_elsewhere(layer, hidden_states):
        return None
    conv_state = cache.layers[layer.layer_idx].conv_states[0]
    if type(conv_state) is not Tensor or conv_state.shape[0] != hidden_states.shape[0]:
        return None
    reason = decoding.decode_reason(layer, hidden_states, conv_state, state)
    y = None if reason else decoding.run_decode(layer, hidden_states, conv_state, state)
    if not torch.compiler.is_compiling():  # a graph that counts would be recompiled for each count
        if y is not None:
            layers_run.add(layer)
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
    return all(
        getattr(type(holder), name, None) is theirs and name not in vars(holder)
        for name, theirs in THEIRS[owner].items()
    )
