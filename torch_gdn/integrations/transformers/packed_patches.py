"""Patches transformers so that `enable()` lets it load quantised files onto `mps` with packed weights."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.patches import Patch, rebind
from torch_gdn.quantized import configuration
from torch_gdn.quantized.formats import Format, OtherFormat

PLACED_BY_TRANSFORMERS = ("auto", "balanced", "balanced_low_0", "sequential")


def packed_patches() -> Iterator[Patch]:
    """Yields a patch that only warns, if the quantizer does not know this version's loading."""
    modeling = importlib.import_module("transformers.modeling_utils")
    if not hasattr(modeling, "get_hf_quantizer"):
        return
    if versions.is_served(versions.installed()):
        quantizer = importlib.import_module("torch_gdn.integrations.transformers.packed_quantizer")
        yield rebind(modeling, "get_hf_quantizer", quantizer.with_packed_weights)
    else:
        yield rebind(modeling, "get_hf_quantizer", with_warning)


def with_warning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' `get_hf_quantizer`, so that it says that the weights of a file will not stay packed."""

    def get_hf_quantizer(config: Any, quantization_config: Any, device_map: Any, *others: Any, **options: Any) -> Any:
        form = None
        with suppress(ValueError):  # a file that torch_gdn would refuse
            form = packed_format(config, quantization_config, device_map, options)
        if form is not None:
            reason = versions.why_not_served(versions.installed())
            warnings.warn(f"torch_gdn's packed weights {reason}: transformers loads this file", stacklevel=3)
        return original(config, quantization_config, device_map, *others, **options)

    return get_hf_quantizer


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
