"""Verifies drafts on mps with the launches that decode one token, and takes them back without a launch.

`gdn_decode_` reads a layer's state once and keeps the state after each token. The cache then has a view of the state
after the last accepted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from torch_gdn.integrations.transformers import decoding, dispatch, layers_run
from torch_gdn.integrations.transformers.calls import Binder
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

STEPS = "torch_gdn_steps"  # attribute of a cache's layer
MOST = 17  # tokens of a step whose states are kept


@dataclass
class Steps:
    """One layer's states after each token of the last step, in the slots that `gdn_decode_` takes."""

    states: Tensor  # [slots, HV, K, V]
    columns: Tensor  # [slots, D, slots + W - 1]; the first slot is used, and its first column completes a view
    width: int  # W
    accepted: int = 1  # tokens of the last step that stay
    tokens: int = 1  # of the last step

    @classmethod
    def behind(cls, layer: LinearAttentionLayer, tokens: int) -> Steps:
        """Returns slots for steps of so many tokens, which continue from a cache's layer."""
        state, columns, width = layer.recurrent_states[0], layer.conv_states[0], layer.conv_kernel_size[0]
        result = cls(
            state.new_zeros(tokens, *state.shape[1:]),
            columns.new_zeros(tokens, columns.shape[1], tokens + width - 1),
            width,
        )
        result.states[:1].copy_(state)
        result.columns[:1, :, 1:width].copy_(columns[..., 1 - width :])
        return result

    def keep(self, layer: LinearAttentionLayer, accepted: int) -> None:
        """Gives the cache's layer the state after so many tokens of the last step."""
        self.accepted = accepted
        layer.recurrent_states[0] = self.states[accepted - 1 : accepted]
        layer.conv_states[0] = self.columns[:1, :, accepted - 1 : accepted - 1 + self.width]

    def is_held_by(self, layer: LinearAttentionLayer) -> bool:
        state: Tensor = layer.recurrent_states[0]
        return state.data_ptr() == self.states[self.accepted - 1].data_ptr()


def steps_of(layer: LinearAttentionLayer) -> Steps | None:
    """Returns the slots of a cache's layer whose last step was in them."""
    result: Steps | None = vars(layer).get(STEPS)
    return result if result is not None and result.is_held_by(layer) else None


def take_back(layer: LinearAttentionLayer, steps: Steps, tokens: int) -> None:
    if not 0 <= tokens < steps.tokens:
        raise ValueError(f"crop: tokens_to_remove: expected at least {1 - steps.tokens}, got {-tokens}")
    steps.keep(layer, steps.tokens - tokens)


def verifier(original: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """Returns a function that runs a layer on a step of drafts, or returns None. `original` is the layer's forward."""
    bind = Binder(decoding.cached_layer, original, {CACHE_NAMES.delta_net: "kv_cache"}).bind

    def run(*args: Any, **kwargs: Any) -> Tensor | None:
        given, options, unknown = bind(args, kwargs)
        held = None if unknown or torch.is_grad_enabled() else decoding.cached_layer(*given, **options)
        return None if held is None else verify(given[0], given[1], held)

    return run


def verify(layer: Any, hidden_states: Tensor, held: LinearAttentionLayer) -> Tensor | None:
    """Returns the layer's output for 2 to 17 tokens that follow a cached text, or None if it writes nothing."""
    tokens = hidden_states.shape[1]
    if hidden_states.shape[0] != 1 or not 2 <= tokens <= MOST or not held.has_previous_state[0]:
        return None
    conv_state, state = held.conv_states[0], held.recurrent_states[0]
    if state.dtype != torch.float32 or decoding.decode_reason(layer, hidden_states, conv_state, state):
        return None
    steps = steps_of(held)
    if steps is None or tokens > len(steps.states):
        steps = Steps.behind(held, tokens)
    slots = torch.arange(len(steps.states), dtype=torch.int32)[None]
    accepted = torch.tensor([steps.accepted], dtype=torch.int32)
    y = decoding.run_decode(layer, hidden_states, steps.columns[..., 1:], steps.states, slots, accepted)
    if y is not None:
        setattr(held, STEPS, steps)
        steps.tokens = tokens
        steps.keep(held, tokens)
        layers_run.add(layer)
        dispatch.count(decoding.NAME, "")
    return y
