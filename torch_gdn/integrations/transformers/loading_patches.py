"""Patches transformers' loading of models onto `mps`: quantised files keep packed weights, a model above what Metal
recommends is refused before its weights are read, and a GGUF file gets the model's own Gated DeltaNet layers.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch

from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.patches import Patch, rebind
from torch_gdn.memory import check_memory
from torch_gdn.quantized import configuration
from torch_gdn.quantized.formats import Format, OtherFormat

PLACED_BY_TRANSFORMERS = ("auto", "balanced", "balanced_low_0", "sequential")
GGML_LAYERS = ("Qwen3_5GatedDeltaNet",)  # `kernels`' names; Qwen3.5's mixture of experts has the same


# ---- quantised files -------------------------------------------------------------------------------------------------


def packed_patches() -> Iterator[Patch]:
    modeling = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling, "get_hf_quantizer"):
        yield rebind(modeling, "get_hf_quantizer", with_packed_weights)


def with_packed_weights(
    original: Callable[..., Any], config: Any, quantization_config: Any, device_map: Any, *others: Any, **options: Any
) -> Any:
    """Wraps transformers' `get_hf_quantizer`, so that quantised files for `mps` get `PackedQuantizer`.

    With a version whose loading that does not know, it only warns that the weights of a file will not stay packed.
    """
    reason, form = versions.why_not_served(versions.installed()), None
    with suppress(ValueError) if reason else nullcontext():  # transformers loads what torch_gdn would refuse
        form = packed_format(config, quantization_config, device_map, options)
    if form is None or reason:
        if form is not None:
            warnings.warn(f"torch_gdn's packed weights {reason}: transformers loads this file", stacklevel=3)
        return original(config, quantization_config, device_map, *others, **options)
    form.say_what_is_left_out()
    packed = importlib.import_module("torch_gdn.integrations.transformers.packed_quantizer")
    config.quantization_config = packed.PackedConfig(quantization_of(config), form.method)
    quantizer = packed.PackedQuantizer(config.quantization_config, form)
    return quantizer, config, quantizer.update_device_map(device_map)


def packed_format(config: Any, quantization_config: Any, device_map: Any, options: dict[str, Any]) -> Format | None:
    """Returns the format of a quantised file for `mps` that torch_gdn could load with packed weights."""
    content = quantization_of(config)
    asked = quantization_config is None and options.get("gguf_file") is None and is_on_mps(device_map)
    if not asked or not isinstance(content, dict):
        return None
    try:
        return configuration.read(content)
    except OtherFormat:  # transformers' own code may read it
        return None


def quantization_of(config: Any) -> Any:
    text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)


def is_on_mps(device_map: Any) -> bool:
    if isinstance(device_map, str) and device_map in PLACED_BY_TRANSFORMERS:
        return torch.backends.mps.is_available()
    devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    return bool(devices) and all(device is not None and str(device).split(":")[0] == "mps" for device in devices)


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_patches() -> Iterator[Patch]:
    """Yields nothing for a transformers before 5, which has no separate function that counts a model's bytes."""
    modeling = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling, "get_total_byte_count") and hasattr(modeling, "caching_allocator_warmup"):
        yield rebind(modeling, "caching_allocator_warmup", with_memory_check)


def with_memory_check(
    original: Callable[..., Any], model: Any, expanded_device_map: Mapping[str, Any], hf_quantizer: Any
) -> Any:
    """Wraps what transformers calls between building the model without memory and reading its weights."""
    devices = {name: torch.device(device) for name, device in expanded_device_map.items() if device != "disk"}
    on_mps = {name: device for name, device in devices.items() if device.type == "mps"}
    if hf_quantizer is None and on_mps:  # a quantizer knows its own sizes; torch_gdn's checks them itself
        modeling = importlib.import_module("transformers.modeling_utils")
        needed = sum(modeling.get_total_byte_count(model, on_mps).values())
        check_memory(f"the weights of {type(model).__name__}", needed, torch.device("mps"))
    return original(model, expanded_device_map, hf_quantizer)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_patches() -> Iterator[Patch]:
    """Yields nothing for a transformers that takes no layers from ggml."""
    try:
        module = importlib.import_module("transformers.integrations.gguf.kernels")
    except ModuleNotFoundError:
        return
    yield rebind(module, "get_ggml_layer_mapping", without_our_layers)


def without_our_layers(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """transformers puts only mapped layers into the model, and inherits no other mapping."""
    return {name: devices for name, devices in original().items() if name not in GGML_LAYERS}
