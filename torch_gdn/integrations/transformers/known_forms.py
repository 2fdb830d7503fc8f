"""Classes of transformers' models that compute what is known, found by trying them.

A class is taken if a small instance of it has the results of the form that torch_gdn computes. One that cannot be built
from the few sizes that are given here, or that computes something else, is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Compute = Callable[..., Any]  # of a layer and its arguments
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


def classes(module: ModuleType, ending: str) -> Iterator[type]:
    """Yields the classes that the module defines: an imported one is of another library."""
    for owner in vars(module).values():
        if isinstance(owner, type) and owner.__module__ == module.__name__ and owner.__name__.endswith(ending):
            yield owner


def has_form(owner: type, options: dict[str, Any], call: Callable[[], tuple[Any, ...]], compute: Compute) -> bool:
    """Whether an instance, built from SIZES and `options`, returns what `compute` returns for the same call."""
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            layer = owner(SimpleNamespace(**SIZES), **options)
            for weight in layer.parameters():
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            given = call()
            expected, found = first(layer(*given)), first(compute(layer, *given))
        except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError):
            return False  # a layer of another kind
    return isinstance(expected, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def is_elsewhere(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the call goes to transformers' own layer without a word: on another device, or in a compiled graph."""
    x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return x.device.type != "mps" or torch.compiler.is_compiling()
