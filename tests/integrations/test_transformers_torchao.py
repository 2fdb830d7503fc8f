"""Tests that a model whose layers torchao quantised computes on mps what it computes on the CPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.helpers.devices import ready
from tests.integrations import models
from tests.integrations.models import decode, distance, random_model, torch_gdn_enabled

quantization = pytest.importorskip(
    "torchao.quantization", reason="torchao is not installed: pip install 'torchao>=0.18'"
)

KINDS = [kind for kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe") if models.available(kind)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
def test_int8_weights(kind: str) -> None:
    """The weight is a tensor subclass, which only torch.nn.Linear's own forward multiplies by."""
    device, model = ready("mps"), random_model(kind).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    layers = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    assert layers and not any(type(x.weight) is nn.Parameter for x in layers.values())
    with torch.no_grad():
        expected = decode(model, torch.device("cpu"))
    with torch.no_grad(), torch_gdn_enabled() as transformers, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = decode(copy.deepcopy(model).to(device), device)
        ran = transformers.status().ran
    assert distance(result, expected) < 5e-6
    assert ran["chunk_gated_delta_rule"] > 0 and "moe_block" not in ran
