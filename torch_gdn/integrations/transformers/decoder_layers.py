"""Runs decoder layers of transformers' models on mps in fewer launches. The norm after the mixer adds the mixer's
output to the residual, and the MLP adds its own residual. No sum is rounded before it is used.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import known_forms, norms
from torch_gdn.integrations.transformers.functions import Function, are_alike, grad_reason

WIDTH = 32  # the width of the layers that the trial builds
MIXERS = {"linear_attn": "linear_attention", "self_attn": "full_attention"}  # attribute -> kind of layer


def layer_classes(module: ModuleType) -> Iterator[type]:
    """Yields the module's decoder layers that are x + mixer(norm(x)), and the same with an MLP."""
    for owner in known_forms.classes(module, "DecoderLayer"):
        for norm in norms.norm_classes(module):
            if is_known(owner, norm):
                yield owner
                break


class Part(nn.Module):
    """Takes the place of a mixer or an MLP: a product that depends on all named arguments."""

    def __init__(self, *, is_attention: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.is_attention = is_attention  # and returns weights of keys too

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        y = hidden_states @ self.weight * (1 + zlib.crc32(repr(sorted(options.items())).encode()) / 2**32)
        return (y, None) if self.is_attention else y


@plain.once_per_code
def is_known(owner: type, norm: type) -> bool:
    """Tries a layer with either mixer. Layers of some classes have only one of them."""
    found = [known_forms.has_form(functools.partial(built, owner, norm, mixer), call, run_layer) for mixer in MIXERS]
    return True in found and False not in found


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns strings for the arguments that a layer only passes on."""
    names = ("position_embeddings", "attention_mask", "position_ids", "past_key_values", "another")
    return (torch.randn(2, 3, WIDTH),), {name: f"the {name}" for name in names}


def built(owner: Any, norm: type, mixer: str, configuration: Any) -> Any:
    """Builds a layer without its constructor, which needs a whole configuration."""
    layer = owner.__new__(owner)
    nn.Module.__init__(layer)
    layer.block_type = layer.layer_type = MIXERS[mixer]
    setattr(layer, mixer, Part(is_attention=mixer == "self_attn"))
    layer.mlp = Part(is_attention=False)
    layer.input_layernorm, layer.post_attention_layernorm = norm(WIDTH), norm(WIDTH)
    return layer


def layer_reason(layer: Any, hidden_states: Tensor, *others: Any, **options: Any) -> str:
    norm = layer.post_attention_layernorm
    if change := norms.change_of(norm):
        return change
    return grad_reason(layer) or norms.norm_reason(norm, hidden_states)


def run_layer(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> Tensor:
    options |= {"hidden_states": layer.input_layernorm(hidden_states), "attention_mask": attention_mask}
    if hasattr(layer, "linear_attn"):
        mixed = layer.linear_attn(cache_params=past_key_values, **options)
    else:
        of_keys = {"position_embeddings": position_embeddings, "position_ids": position_ids}
        mixed, _ = layer.self_attn(past_key_values=past_key_values, **of_keys, **options)
    norm = layer.post_attention_layernorm
    if are_alike(mixed, hidden_states) and mixed.shape == hidden_states.shape:
        y, residual = norms.form_of(norm).apply_to_sum(norm, mixed, hidden_states)
    else:  # a hook or another class of mixer may return anything
        residual = hidden_states + mixed
        y = norm(residual)
    return add_mlp(layer.mlp, y, residual)


def add_mlp(mlp: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Lets an MLP or a block that torch_gdn computes add the residual. A hook would see the sum."""
    found: Tensor
    if not plain.change_of(mlp, plain.known) and getattr(type(mlp).forward, "adds_residual", False):
        found = mlp(x, residual=residual)
        return found
    found = residual + known_forms.first(mlp(x))
    return found


FUNCTIONS = {"decoder_layer": Function(layer_reason, run_layer, ("rms_norm",), known_forms.is_elsewhere)}
