"""Remembers which Gated DeltaNet and Kimi Delta Attention layers ran on torch_gdn since enable()."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

known: dict[int, weakref.ref[Module]] = {}  # by id, because this is asked for each token
running = threading.local()  # .layer is the one whose forward runs in this thread


def add(layer: Module | None = None) -> None:
    """Adds a layer, or the one whose forward runs."""
    layer = getattr(running, "layer", None) if layer is None else layer
    if layer is not None and id(layer) not in known:
        number = id(layer)
        known[number] = weakref.ref(layer, lambda _: known.pop(number, None))


def reset() -> None:
    known.clear()


def noting_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer's forward, so that the functions that it calls know the layer."""
    if torch.compiler.is_compiling():
        return original(layer, *args, **kwargs)
    outer, running.layer = getattr(running, "layer", None), layer
    try:
        return original(layer, *args, **kwargs)
    finally:
        running.layer = outer
