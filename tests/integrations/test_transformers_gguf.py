"""Tests models from GGUF files, into which transformers' own function puts ggml's layers. There is a stand-in for
ggml's layer, and one for `kernels`, which replaces forward of an object as `kernels` does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.devices import kernels_run, ready
from tests.integrations import models
from tests.integrations.models import distance, random_model
from torch_gdn.integrations import transformers

KINDS = [kind for kind in ("qwen3_5", "qwen3_5_moe") if models.available(kind)]
GRAFTS = "transformers.integrations.gguf.kernels"


class GgmlGatedDeltaNet(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("ggml's layer")


class Repository:
    """A repository on the Hub."""

    def __init__(self, *, layer_name: str, repo_id: str, version: int) -> None:
        self.layer_name = layer_name

    def load(self) -> Any:
        if self.layer_name != "Qwen3_5GatedDeltaNet":
            raise FileNotFoundError(self.layer_name)
        return GgmlGatedDeltaNet


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    try:
        module = importlib.import_module(GRAFTS)
    except ModuleNotFoundError as error:
        pytest.skip(f"this transformers takes no layers from ggml: {error}")
    mappings: list[dict[str, Any]] = []

    @contextmanager
    def use_kernel_mapping(mapping: dict[str, Any], inherit_mapping: bool) -> Iterator[None]:
        mappings.append(mapping)
        yield
        mappings.pop()

    def kernelize(model: nn.Module, mode: str, device: str) -> None:
        names = {"Qwen3_5MoeGatedDeltaNet": "Qwen3_5GatedDeltaNet"}
        for layer in model.modules():
            name = type(layer).__name__
            repository = mappings[-1].get(names.get(name, name), {}).get(device, {}).get(mode)
            if repository is not None:
                layer.forward = MethodType(repository.load().forward, layer)

    stand_in = SimpleNamespace(
        LayerRepository=Repository,
        Mode=SimpleNamespace(INFERENCE="inference"),
        kernelize=kernelize,
        register_kernel_mapping=lambda mapping: None,
        use_kernel_mapping=use_kernel_mapping,
    )
    monkeypatch.setitem(sys.modules, "kernels", stand_in)
    monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    transformers.disable()
    yield module
    transformers.disable()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_ggmls_layer_is_not_put_into_an_enabled_model(gguf: ModuleType, kind: str) -> None:
    expected = models.decode(random_model(kind), torch.device("cpu"), prompt=17, steps=(1,))
    device = ready("mps")
    transformers.enable()
    model = random_model(kind).to(device)
    gguf.kernelize_ggml_layers(model)
    with kernels_run(device, "fused_chunk_gated_delta_rule", "gdn_decode", "causal_conv1d"):
        result = models.decode(model, device, prompt=17, steps=(1,))
    assert distance(result, expected) < 4e-6
    ran = transformers.status().ran
    assert ran["chunk_gated_delta_rule"] == ran["gdn_decode"] > 0
    transformers.disable()
    models.decode(model, device, prompt=17, steps=(1,))
    assert transformers.status().ran == ran


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_disable_leaves_ggmls_layer_to_transformers(gguf: ModuleType, kind: str) -> None:
    """The stand-in's layer, which raises, is then in the model."""
    before = gguf.get_ggml_layer_mapping
    assert transformers.enable().replaced["GGUF"] == ("get_ggml_layer_mapping",)
    transformers.disable()
    assert gguf.get_ggml_layer_mapping is before
    device = ready("mps")
    model = random_model(kind).to(device)
    gguf.kernelize_ggml_layers(model)
    with pytest.raises(RuntimeError, match="ggml's layer"):
        models.decode(model, device, prompt=17, steps=(1,))


def test_a_function_kept_while_enabled_is_transformers_own_after_disable(gguf: ModuleType) -> None:
    """A program may hold it by another name, which disable() does not restore."""
    transformers.enable()
    kept = gguf.get_ggml_layer_mapping
    assert "Qwen3_5GatedDeltaNet" not in kept()
    transformers.disable()
    assert "Qwen3_5GatedDeltaNet" in kept()
