"""Runs decoder layers and MLPs of transformers' models on mps in fewer launches.

The norm after the mixer adds the mixer's output to the residual, and the MLP adds its own residual. No sum is rounded
before it is used.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import known_forms, norms
from torch_gdn.integrations.transformers.functions import Function, are_alike, common_reason, grad_reason
from torch_gdn.integrations.transformers.refusal import refusal_of
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

WIDTH = 32  # the width of the layers that the trial builds
IGNORED = ("use_cache", "output_attentions")  # by layers that name them
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
        y = hidden_states @ self.weight * known_forms.number_of(options)
        return (y, None) if self.is_attention else y


@plain.once_per_code
def is_known(owner: type, norm: type) -> bool:
    """Tries a layer with either mixer. Layers of some classes have only one of them."""
    builds = [functools.partial(built, owner, norm, mixer) for mixer in MIXERS]
    result = [known_forms.has_form(build, calls, FUNCTIONS["decoder_layer"]) for build in builds]
    return True in result and False not in result


def calls(run: Any) -> list[Any]:
    """Calls a layer with strings for the arguments that it only passes on."""
    names = ("position_embeddings", "attention_mask", "position_ids", CACHE_NAMES.model, "cu_seq_lens_q", *IGNORED)
    given = {name: f"the {name}" for name in (*names, "another")}
    return [run(torch.randn(2, tokens, WIDTH), **given) for tokens in (3, 1)]


def built(owner: Any, norm: type, mixer: str, configuration: Any) -> Any:
    """Builds a layer without its constructor, which needs a whole configuration."""
    layer: Any = object.__new__(type(owner.__name__, (owner,), {"__getattr__": attribute_of}))
    nn.Module.__init__(layer)
    layer.block_type = layer.layer_type = MIXERS[mixer]
    setattr(layer, mixer, Part(is_attention=mixer == "self_attn"))
    layer.mlp = Part(is_attention=False)
    layer.input_layernorm, layer.post_attention_layernorm = norm(WIDTH), norm(WIDTH)
    return layer


def attribute_of(layer: Any, name: str) -> Any:
    """Ends the trial of a layer that reads an attribute which other layers do not have, even with a default."""
    try:
        return nn.Module.__getattr__(layer, name)
    except AttributeError:
        if name in MIXERS or name.startswith("_"):
            raise
        raise RuntimeError(f"an attribute of another kind of layer: {name}") from None


def layer_reason(layer: Any, hidden_states: Tensor, *others: Any, **options: Any) -> str:
    norm = layer.post_attention_layernorm
    if change := norms.change_of(norm):
        return change
    return grad_reason(layer) or norms.norm_reason(norm, hidden_states)


def run_layer(
    layer: Any,
    hidden_states: Tensor,
    /,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    kv_cache: Any = None,
    **options: Any,
) -> Tensor:
    """Runs the layer, and passes its options on to the mixer, as transformers does."""
    options |= {"hidden_states": layer.input_layernorm(hidden_states), "attention_mask": attention_mask}
    if hasattr(layer, "linear_attn"):
        mixed = layer.linear_attn(**{CACHE_NAMES.delta_net: kv_cache}, **options)
    else:
        positions = {"position_embeddings": position_embeddings, "position_ids": position_ids}
        mixed, _ = layer.self_attn(**{CACHE_NAMES.model: kv_cache}, **positions, **options)
    norm = layer.post_attention_layernorm
    if are_alike(mixed, hidden_states) and mixed.shape == hidden_states.shape:
        y, residual = norms.form_of(norm).apply(norm, mixed, hidden_states)
    else:  # a hook or another class of mixer may return anything
        residual = hidden_states + mixed
        y = norm(residual)
    return add_mlp(layer.mlp, y, residual)


def add_mlp(mlp: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Lets an MLP or a block that torch_gdn computes add the residual. A hook would see the sum."""
    result: Tensor
    if not plain.change_of(mlp, plain.known) and getattr(type(mlp).forward, "adds_residual", False):
        result = mlp(x, residual=residual)
        return result
    result = residual + known_forms.first(mlp(x))
    return result


# ---- the MLP: silu(gate) * up in one launch instead of two -----------------------------------------------------------


def mlp_classes(module: ModuleType) -> Iterator[type]:
    """Yields the classes of a model's module that compute down(silu(gate(x)) * up(x))."""
    return (owner for owner in known_forms.classes(module, "MLP") if is_known_mlp(owner))


@plain.once_per_code
def is_known_mlp(owner: type) -> bool:
    """Draws large inputs too: they show whether a class limits its values."""
    builds = (owner, functools.partial(owner, intermediate_size=24))
    result = [
        known_forms.has_form(build, lambda run: run(30 * torch.randn(5, 32)), FUNCTIONS["mlp"]) for build in builds
    ]
    return True in result and False not in result


def mlp_reason(mlp: Any, x: Tensor, residual: Tensor | None = None) -> str:
    if change := plain.change_of(mlp.act_fn, known_forms.SILU):
        return change
    number = ((1,), x.dtype)
    return grad_reason(mlp) or common_reason(x) or refusal_of("act_and_mul", gate=number, up=number)


def run_mlp(mlp: Any, x: Tensor, /, residual: Tensor | None = None) -> Tensor:
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    hidden = torch.ops.gdn.act_and_mul(gate, up) if are_alike(gate, up) else mlp.act_fn(gate) * up
    if residual is None:
        result: Tensor = down(hidden)
        return result
    if not plain.change_of(down, plain.LINEARS) and down.bias is None and are_alike(down.weight, residual, hidden):
        rows = residual.flatten(0, -2), hidden.flatten(0, -2)
        return torch.addmm(*rows, down.weight.mT).view_as(residual)
    return residual + down(hidden)


FUNCTIONS = {
    "decoder_layer": Function(layer_reason, run_layer, known_forms.is_skipped, ignored=IGNORED, cache_of="model"),
    "mlp": Function(mlp_reason, run_mlp, known_forms.is_skipped, adds_residual=True),
}
