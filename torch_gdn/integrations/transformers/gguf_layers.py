"""Keeps a model's own Gated DeltaNet layer when transformers, loading a GGUF file onto `mps`, would take ggml's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch_gdn.integrations.transformers.patches import Patch, rebind

LAYERS = ("Qwen3_5GatedDeltaNet",)  # `kernels`' names; Qwen3.5's mixture of experts has the same


def gguf_patches() -> Iterator[Patch]:
    """Yields nothing for a transformers that takes no layers from ggml."""
    try:
        module = importlib.import_module("transformers.integrations.gguf.kernels")
    except ModuleNotFoundError:
        return
    yield rebind(module, "get_ggml_layer_mapping", without_our_layers)


def without_our_layers(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """transformers puts only mapped layers into the model, and inherits no other mapping."""
    return lambda: {name: devices for name, devices in original().items() if name not in LAYERS}
