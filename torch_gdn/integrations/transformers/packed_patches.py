"""Patches transformers so that `enable()` lets it load quantised files onto `mps` with packed weights."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator

from torch_gdn.integrations.transformers.patches import Patch, rebind

VERSION = "5.23"  # the quantizer knows this version's loading


def packed_patches() -> Iterator[Patch]:
    """Yields nothing for another version of transformers."""
    if importlib.metadata.version("transformers").startswith(f"{VERSION}."):
        modeling = importlib.import_module("transformers.modeling_utils")
        quantizer = importlib.import_module("torch_gdn.integrations.transformers.packed_quantizer")
        yield rebind(modeling, "get_hf_quantizer", quantizer.with_packed_weights)
