"""Enables assisted generation with Gated DeltaNet and Kimi Delta Attention layers: `crop` takes their states back too.

transformers' caches can record: `crop` then removes tokens from keys, values and convolutions' columns, but cannot
remove them from the states. Here a recording layer keeps its state of the last `crop` and the rule's inputs since
then, and a `crop` runs the rule, without the model, over the tokens that stay.

On mps, drafts are verified with the launches that decode one token, and taken back without a launch: `gdn_decode_`
reads a layer's state once and keeps the state after each token. The cache then has a view of the state after the last
accepted one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

import torch_gdn
from torch_gdn.integrations.transformers import decoding, dispatch, drafts, known_forms
from torch_gdn.integrations.transformers.calls import Bound
from torch_gdn.integrations.transformers.functions import DELTA_RULES, KDA_FUNCTIONS
from torch_gdn.integrations.transformers.patches import DELTA_LAYERS, Patch, rebind
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

KEPT = 64  # tokens at the end of a prompt that can be taken back
CHUNK = 64
HISTORY = "torch_gdn_history"  # attribute of a cache's layer
STEPS = "torch_gdn_steps"  # likewise
MOST = 17  # tokens of a step whose states are kept
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # k, v, g and beta of the same tokens


def rollback_patches(modules: dict[str, ModuleType]) -> Iterator[Patch]:
    """Yields the patches. `modules` are those of the models."""
    yield rebind(LinearAttentionCacheLayerMixin, "crop", crop_with_state)
    own = vars(LinearAttentionCacheLayerMixin)["is_croppable"]
    yield Patch(LinearAttentionCacheLayerMixin, "is_croppable", own, croppable_with_history(own))
    for model in known_forms.models_of(modules):
        yield Patch(model, "_is_stateful", vars(model)["_is_stateful"], False)
    for module in modules.values():
        for layer in known_forms.classes(module, DELTA_LAYERS):
            is_gated = layer.__name__.endswith("GatedDeltaNet")
            with_history = functools.partial(forward_with_history, decoding.binder_of(layer))
            yield rebind(layer, "forward", with_history if is_gated else forward_of_kda)
    yield from drafts.draft_patches(modules)


@dataclass
class History:
    """One layer's state at the last `crop`, and its rule's inputs since then."""

    state: Tensor | None  # None means zeros
    since: list[Inputs]
    options: dict[str, Any]

    def run(self, inputs: Iterable[Tensor], state: Tensor | None, chunked: bool = False) -> tuple[Tensor, Tensor]:
        """Runs few tokens as in decoding, with the bits of one token at a time. `inputs` are q, k, v, g and beta."""
        q, k, v, g, beta = inputs
        names = KDA_FUNCTIONS if g.dim() == 4 else DELTA_RULES
        rule: Callable[..., tuple[Any, Any]] = getattr(torch_gdn, names[0 if chunked else 1])
        return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **self.options)

    def before(self, tokens: int, latest: Tensor) -> Tensor:
        """Returns the state without the last tokens. `latest` is the state with them."""
        if not tokens or not self.since:
            return latest
        k, v, g, beta = self.since[0]  # a step of drafts is one part, which costs no copy
        if len(self.since) > 1:
            k, v, g, beta = (torch.cat(x, 1) for x in zip(*self.since, strict=True))
        stay = k.shape[1] - tokens
        if stay < 0:
            raise ValueError(f"crop: tokens_to_remove: expected at least -{k.shape[1]}, got -{tokens}")
        if stay:
            return self.run((x[:, :stay] for x in (k, k, v, g, beta)), self.state)[1]
        return torch.zeros_like(latest) if self.state is None else self.state


class Recorder:
    """Takes the place of a recording layer of a cache in one call of the model's layer."""

    def __init__(self, layer: LinearAttentionCacheLayerMixin) -> None:
        self.layer = layer

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Convolves as usual, because the cache takes columns back by itself."""
        y, _ = torch.ops.gdn.causal_conv1d(x, weight, bias, activation=activation)
        return y

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        history = vars(self.layer).get(HISTORY)
        if history is None or initial_state is None or not history.since:
            history = History(initial_state, [], options)
            setattr(self.layer, HISTORY, history)
        inputs = (q, k, v, g, beta)
        head = (q.shape[1] - KEPT) // CHUNK * CHUNK
        if head <= 0:
            history.since.append(inputs[1:])
            o, state = history.run(inputs, initial_state)
        else:  # all of a prompt but its end goes into the stored state
            first, history.state = history.run((x[:, :head] for x in inputs), initial_state, chunked=True)
            q, k, v, g, beta = (x[:, head:] for x in inputs)
            history.since = [(k, v, g, beta)]
            second, state = history.run((q, k, v, g, beta), history.state)
            o = torch.cat([first, second], 1)
        if self.layer.is_recurrent_states_initialized[0]:
            # The kept tensor is the one into which the cache would otherwise copy the new state.
            self.layer.recurrent_states[0] = state
        return o, state


def forward_with_history(
    bind: Callable[..., Bound], original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    cache = kwargs.get(CACHE_NAMES.delta_net)
    if cache is not None and cache.is_recording_past(layer.layer_idx):
        # After each step of this call its drafts are taken back. A draft model takes back several steps at once.
        if (call := drafts.current.get()) is not None and call.cache is cache:
            given, options, unknown = bind((layer, *args), kwargs)
            held = None if unknown or torch.is_grad_enabled() else decoding.cached_layer(*given, **options)
            y = None if held is None else verify(layer, given[1], held)
            if y is not None:
                vars(cache.layers[layer.layer_idx])[HISTORY] = History(None, [], {})
                return y
        kwargs["layer_states"] = Recorder(cache.layers[layer.layer_idx])
    return original(layer, *args, **kwargs)


class WithoutColumns:
    """Takes the place of a recording cache in one call of a Kimi Delta Attention layer.

    With columns, the layer would decode a single token in place, and the cache would not see its column.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def get_conv_state(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def forward_of_kda(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get(CACHE_NAMES.delta_net)
    if cache is not None and cache.is_recording_past(layer.layer_idx):
        kwargs["layer_states"] = Recorder(cache.layers[layer.layer_idx])
        kwargs[CACHE_NAMES.delta_net] = WithoutColumns(cache)
    return original(layer, *args, **kwargs)


def croppable_with_history(own: Any) -> property:
    """Says that a layer can be cropped whose inputs are recorded. `own` is transformers' property."""

    def is_croppable(layer: Any) -> bool:
        return HISTORY in vars(layer) or bool(own.__get__(layer))

    return property(is_croppable)


def crop_with_state(original: Callable[..., None], layer: Any, tokens_to_remove: int) -> None:
    if (steps := steps_of(layer)) is not None:
        take_back(layer, steps, -tokens_to_remove)
        return
    original(layer, tokens_to_remove)
    if (history := vars(layer).get(HISTORY)) is not None:
        layer.recurrent_states[0] = history.before(-tokens_to_remove, layer.recurrent_states[0])
        history.since = []


def stop_recording(cache: Any) -> None:
    """Undoes `activate_past_recording` after a `crop`, so that states are decoded in place again."""
    for layer in cache.layers:
        for name in {HISTORY, STEPS} & vars(layer).keys():
            delattr(layer, name)
        for name in {"record_past", "recording"} & vars(layer).keys():
            setattr(layer, name, False)


# ---- steps of drafts on mps ------------------------------------------------------------------------------------------


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
        dispatch.add_layer(layer)
        dispatch.count(decoding.NAME, "")
    return y
