"""Sends each call to torch_gdn's function or to the one that transformers would have called, and counts."""

import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torch_gdn.integrations.plain import change_of_itself
from torch_gdn.integrations.transformers import (
    attention,
    decoder_layers,
    decoding,
    experts,
    functions,
    known_forms,
    norms,
)
from torch_gdn.integrations.transformers.calls import Binder, binder_of
from torch_gdn.integrations.transformers.functions import CACHED_STATE, DELTA_RULES, KDA_FUNCTIONS
from torch_gdn.integrations.transformers.known_forms import first

FUNCTIONS = functions.FUNCTIONS | experts.FUNCTIONS | norms.FUNCTIONS
FUNCTIONS |= attention.FUNCTIONS | decoder_layers.FUNCTIONS | decoding.FUNCTIONS
HINT = ". Ignore transformers' hint to install flash-linear-attention: it needs Triton"  # shown with each fallback
RULES = (*DELTA_RULES, *KDA_FUNCTIONS)  # of which every layer's forward calls one
enabled = False  # between enable() and disable()
ran: Counter[str] = Counter()  # by function
fallbacks: Counter[tuple[str, str]] = Counter()  # by function and reason
layers: dict[int, weakref.ref[Module]] = {}  # whose rule ran on torch_gdn, by id, because each token asks
running = threading.local()  # .layer is the one whose forward runs in this thread


def reason_for(reason_of: Callable[..., str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the reason. A module in the place of another one may lack any attribute."""
    try:
        return reason_of(*args, **kwargs)
    except AttributeError as error:
        return str(error)


def dispatcher(
    function: str,
    original: Callable[..., Any],
    everywhere: bool = False,
    owner: Any = None,
    binder: Binder | None = None,
) -> Callable[..., Any]:
    """Replaces `original`. Each call goes to torch_gdn or, also if it has an unknown argument, to the original.

    `everywhere`: counts all calls, even those that `is_skipped` would skip. `owner`: the class, module or dictionary
    that has the original while torch_gdn is disabled. Whoever has kept the replacement then gets the original too.
    `binder`: of calls of the original.
    """
    is_class = isinstance(owner, type)
    reason_of, run = FUNCTIONS[function].reason, FUNCTIONS[function].run
    is_skipped = None if everywhere else FUNCTIONS[function].is_skipped
    bind = (binder or binder_of(FUNCTIONS[function], original)).bind
    if FUNCTIONS[function].adds_residual:
        original = adding_residual(original)

    @functools.wraps(original, updated=())
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if owner is not None and not enabled:
            kwargs.pop(CACHED_STATE, None)
            return original(*args, **kwargs)
        if is_skipped is not None and is_skipped(*args, **kwargs):
            return original(*args, **kwargs)
        is_eager = not torch.compiler.is_compiling()
        given, options, unknown = bind(args, kwargs)
        reason = unknown or (change_of_itself(args[0], owner) if is_class else "")
        reason = reason or reason_for(reason_of, given, options)
        if reason and "layer_states" in kwargs:  # the original would lose them
            raise ValueError(f"{function} with states that torch_gdn holds: {reason}")
        if is_eager:  # a graph that counts would be recompiled for each count
            count(function, reason)
        if not reason:
            return run(*given, **options)
        kwargs.pop(CACHED_STATE, None)
        return original(*args, **kwargs)

    dispatch.adds_residual = FUNCTIONS[function].adds_residual  # type: ignore[attr-defined]
    return dispatch


def adding_residual(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def add(*args: Any, residual: Tensor | None = None, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result if residual is None else residual + first(result)

    return add


def count(function: str, reason: str) -> None:
    if not reason:
        ran[function] += 1
        if function in RULES:
            add_layer(getattr(running, "layer", None))
        return
    if not known_forms.is_forced() and not any(reason == known for _, known in fallbacks):
        hint = "" if torch.cuda.is_available() else HINT
        warnings.warn(f"torch_gdn leaves {function} to transformers: {reason}{hint}", stacklevel=4)
    fallbacks[function, reason] += 1


def reset_counts() -> None:
    """Resets the counts. Each reason warns again."""
    ran.clear()
    fallbacks.clear()
    layers.clear()


def add_layer(layer: Module | None) -> None:
    if layer is not None and id(layer) not in layers:
        number = id(layer)
        layers[number] = weakref.ref(layer, lambda _: layers.pop(number, None))


def noting_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer's forward, so that the functions that it calls know the layer."""
    if torch.compiler.is_compiling():
        return original(layer, *args, **kwargs)
    outer, running.layer = getattr(running, "layer", None), layer
    try:
        return original(layer, *args, **kwargs)
    finally:
        running.layer = outer
