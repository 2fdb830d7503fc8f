"""Uses torch_gdn's layers when transformers, loading a GGUF file onto `mps`, would take ggml's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch_gdn.integrations.transformers.kernel_mapping import FOLDER
from torch_gdn.integrations.transformers.patches import Patch, rebind

LAYERS = ("Qwen3_5GatedDeltaNet",)  # `kernels`' names; Qwen3.5's mixture of experts has the same


def gguf_patches() -> Iterator[Patch]:
    """Yields nothing for a transformers that takes no layers from ggml."""
    try:
        module = importlib.import_module("transformers.integrations.gguf.kernels")
    except ModuleNotFoundError:
        return
    yield rebind(module, "get_ggml_layer_mapping", with_our_layers)


def with_our_layers(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def mapping() -> dict[str, Any]:
        from kernels import LocalLayerRepository

        found = original()
        for layer in set(LAYERS) & found.keys():
            ours = LocalLayerRepository(FOLDER, layer_name=layer)
            found[layer] = {device: dict.fromkeys(modes, ours) for device, modes in found[layer].items()}
        return found

    return mapping
