"""Patches transformers so that `enable()` refuses a model for `mps` above what Metal recommends, before its weights are
read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torch_gdn.integrations.transformers.patches import Patch, rebind
from torch_gdn.memory import check_memory


def memory_patches() -> Iterator[Patch]:
    """Yields nothing for a transformers before 5, which has no separate function that counts a model's bytes."""
    modeling = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling, "get_total_byte_count") and hasattr(modeling, "caching_allocator_warmup"):
        yield rebind(modeling, "caching_allocator_warmup", with_memory_check)


def with_memory_check(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what transformers calls between building the model without memory and reading its weights."""

    def caching_allocator_warmup(model: Any, expanded_device_map: Mapping[str, Any], hf_quantizer: Any) -> Any:
        devices = {name: torch.device(device) for name, device in expanded_device_map.items() if device != "disk"}
        on_mps = {name: device for name, device in devices.items() if device.type == "mps"}
        if hf_quantizer is None and on_mps:  # a quantizer knows its own sizes; torch_gdn's checks them itself
            modeling = importlib.import_module("transformers.modeling_utils")
            needed = sum(modeling.get_total_byte_count(model, on_mps).values())
            check_memory(f"the weights of {type(model).__name__}", needed, torch.device("mps"))
        return original(model, expanded_device_map, hf_quantizer)

    return caching_allocator_warmup
