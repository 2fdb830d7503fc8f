"""Finds classes of transformers' models that compute a known form, by trying them.

A class is taken if a small instance of it does what torch_gdn's function does in the calls that a model makes. Each
option of the configuration that the instance reads is then changed in turn, and the trial repeated. A class that cannot
be built from the few sizes given here, that computes something else, or that has an option which torch_gdn's function
ignores, is left to transformers.
"""

import importlib
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers.calls import binder_of
from torch_gdn.integrations.transformers.functions import Function

Layer = Callable[..., Any]
Calls = Callable[[Layer], Any]  # calls a layer as a model does, and returns all that can be seen of it
ERRORS = Exception  # what a class of another kind may raise
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


def classes(module: ModuleType, ending: str | tuple[str, ...]) -> list[Any]:
    """Returns the classes that the module itself defines. Imported ones belong to another library."""
    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [x for x in own if x.__name__.endswith(ending)]


def models_of(modules: dict[str, ModuleType]) -> tuple[type, ...]:
    """Returns the base classes of the models in these modules."""
    return tuple(model for module in modules.values() for model in classes(module, "PreTrainedModel"))


@contextmanager
def trial() -> Iterator[None]:
    """Computes on the CPU, without gradients and autocast, and leaves the program's random numbers as they are."""
    whole = torch.autocast("cpu", enabled=False)
    with torch.device("cpu"), torch.no_grad(), whole, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would change the user's numbers on mps too
        yield


class Options(SimpleNamespace):
    """A configuration that knows which of its options were read, present or not."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            object.__getattribute__(self, "__dict__").setdefault("__read__", set()).add(name)
        return super().__getattribute__(name)


def changes(configuration: Options) -> Iterator[tuple[str, Any]]:
    """Yields the options that were read, with other values. Sizes stay."""
    values = vars(configuration)
    for name in sorted(values.get("__read__", ())):  # none if a layer is built otherwise
        value = values.get(name)
        if name.startswith("_"):  # an implementation
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, float):
            yield name, value / 2 + 0.25
        elif name == "hidden_act":
            yield name, "gelu"
        elif isinstance(value, int):
            if name not in SIZES and not name.endswith(("_size", "_experts")):
                yield name, value - 1
        elif value is None:  # a limit, a scale, a flag, or a list by layer
            yield from ((name, other) for other in (2, 0.5, True, ["sliding_attention"]))


def has_form(
    build: Callable[[Any], Any], calls: Calls, function: Function, sizes: dict[str, Any] | None = None
) -> bool | None:
    """Returns whether a layer built from SIZES and `sizes` does what `function` does, whatever its options are.

    Returns None if it cannot be built, or does not take the calls.
    """
    sizes = SIZES | (sizes or {})
    configuration = Options(**sizes)
    result = agrees(build, configuration, calls, function)
    if not result:
        return result
    for name, value in changes(configuration):
        if agrees(build, Options(**sizes | {name: value}), calls, function, may_refuse=True) is False:
            return False
    return True


def agrees(
    build: Callable[[Any], Any], configuration: Options, calls: Calls, function: Function, may_refuse: bool = False
) -> bool | None:
    """Compares one layer. `may_refuse`: whether it also agrees if the function refuses the calls."""
    with trial():
        try:
            layer = build(configuration).eval()
            for weight in layer.parameters():
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            state = torch.get_rng_state()
            expected = calls(layer)
        except ERRORS:
            return None
        torch.set_rng_state(state)
        try:
            result = calls(replacement(function, layer))
        except Refused:
            return may_refuse
        except ERRORS:
            return False
    return is_close(result, expected)


class Refused(Exception):
    """Raised in a trial if a call would go to transformers."""


def replacement(function: Function, layer: Any) -> Layer:
    """Returns torch_gdn's function in place of the layer, on any device."""
    bind = binder_of(function, type(layer).forward).bind

    def call(*args: Any, **kwargs: Any) -> Any:
        given, options, unknown = bind((layer, *args), kwargs)
        if reason := unknown or function.reason(*given, **options):
            raise Refused(reason)
        return function.run(*given, **options)

    return call


def is_close(result: Any, expected: Any) -> bool:
    """Compares results of the same structure."""
    if isinstance(expected, Tensor):
        same = isinstance(result, Tensor) and result.shape == expected.shape and result.dtype == expected.dtype
        return same and torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
    if isinstance(expected, (tuple, list)):
        same = isinstance(result, type(expected)) and len(result) == len(expected)
        return same and all(map(is_close, result, expected))
    return bool(result == expected)


def number_of(options: dict[str, Any]) -> float:
    """Returns a number between 1 and 2 that depends on all names and values."""
    return 1 + zlib.crc32(repr(sorted(options.items())).encode()) / 2**32


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


# ---- where a call runs -----------------------------------------------------------------------------------------------

forced: set[int] = set()  # threads whose calls go to torch_gdn on every device


@contextmanager
def on_every_device() -> Iterator[None]:
    """Sends this thread's calls on the CPU to what runs on mps otherwise, so that they can be compared."""
    forced.add(threading.get_ident())
    try:
        yield
    finally:
        forced.discard(threading.get_ident())


def is_forced() -> bool:
    return bool(forced) and threading.get_ident() in forced


def runs_elsewhere(device: torch.device) -> bool:
    """Returns whether layers on this device silently run transformers' code."""
    return device.type != "mps" and not is_forced()


def is_on_another_device(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether the call silently goes to transformers' own layer, because it is not on mps."""
    x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    return x is None or runs_elsewhere(x.device)


def is_skipped(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether it does so, or is in a compiled graph, where Inductor fuses the layer."""
    return is_on_another_device(layer, *args, **kwargs) or torch.compiler.is_compiling()
