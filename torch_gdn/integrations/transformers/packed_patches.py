"""Quantised files that `enable()` lets transformers load onto `mps` with packed weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from torch_gdn.integrations.transformers.patches import Patch, rebind


def packed_patches() -> Iterator[Patch]:
    """None for a transformers whose loading is another."""
    try:
        base = importlib.import_module("transformers.quantizers.base")
        modeling = importlib.import_module("transformers.modeling_utils")
    except ModuleNotFoundError:
        return
    known = "serialized_names" in vars(base.HfQuantizer) and "update_weight_conversions" in vars(base.HfQuantizer)
    if known and "get_hf_quantizer" in vars(modeling):
        quantizer = importlib.import_module("torch_gdn.integrations.transformers.packed_quantizer")
        yield rebind(modeling, "get_hf_quantizer", quantizer.with_packed_weights)
