"""Finds classes of transformers' models that compute a known form, by trying them.

A class is taken if a small instance of it has the results of the form that torch_gdn computes. A class that
cannot be built from the few sizes given here, or that computes something else, is left to transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_gdn.integrations import plain

Compute = Callable[..., Any]  # takes a layer and its arguments
Call = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]  # draws the arguments, by position and by name
ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError)  # of another kind
SILU: set[type] = set()  # classes of the activation
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "_attn_implementation": "eager",
}


def learn_silu() -> None:
    for owner in (nn.SiLU, type(importlib.import_module("transformers.activations").ACT2FN["silu"])):
        plain.learn(owner)
        SILU.add(owner)


def classes(module: ModuleType, ending: str) -> list[Any]:
    """Returns the classes that the module itself defines. Imported ones belong to another library."""
    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [x for x in own if x.__name__.endswith(ending)]


@contextmanager
def trial() -> Iterator[None]:
    """Computes on the CPU, without gradients, and leaves the program's random numbers as they are."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would change the user's numbers on mps too
        yield


def has_form(build: Callable[[Any], Any], call: Call, compute: Compute) -> bool | None:
    """Returns whether a layer built from SIZES returns what `compute` returns for the same call.

    Returns None if it cannot be built, or does not take the call.
    """
    with trial():
        try:
            layer = build(SimpleNamespace(**SIZES))
            for weight in layer.parameters():
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            given, options = call()
            expected = first(layer(*given, **options))
        except ERRORS:
            return None
        try:
            found = first(compute(layer, *given, **options))
        except ERRORS:
            return False
    return isinstance(expected, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def is_on_another_device(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether the call silently goes to transformers' own layer, because it is not on mps."""
    return next((x.device.type != "mps" for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), True)


def is_elsewhere(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether it does so, or is in a compiled graph, where Inductor fuses the layer."""
    return is_on_another_device(layer, *args, **kwargs) or torch.compiler.is_compiling()
