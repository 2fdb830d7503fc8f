"""Tests that models train with torch_gdn's gradients as they do with transformers' own code."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.devices import kernels_run
from tests.helpers.errors import relative_error
from tests.integrations.models import KINDS, random_model, random_tokens, torch_gdn_enabled

STEPS = 4
KIND = "qwen3_5" if "qwen3_5" in KINDS else "qwen3_next"


class LoRA(nn.Module):
    """Adds a product of two small matrices to a frozen layer."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x @ self.A.T @ self.B.T
        return y


def trainable(how: str) -> Any:
    model = random_model(KIND)
    if how == "LoRA":
        torch.manual_seed(0)
        model.requires_grad_(False)
        layers = [(module, name, x) for module in model.modules() for name, x in module.named_children()]
        for module, name, layer in layers:
            if isinstance(layer, nn.Linear) and name in ("in_proj_qkv", "in_proj_qkvz", "out_proj", "q_proj"):
                setattr(module, name, LoRA(layer))
    return model


def losses(model: Any, device: torch.device) -> list[float]:
    model = copy.deepcopy(model).to(device)
    learned = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=0.1)
    tokens, found = random_tokens(2, 40).to(device), []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("how", ["full", "LoRA"])
def test_the_losses_are_those_of_transformers(device: torch.device, how: str) -> None:
    model = trainable(how)
    expected = losses(model, torch.device("cpu"))
    assert expected[-1] < expected[0] - 1e-3, "it learns"
    kernels = ("norm_bwd", "causal_conv1d_bwd") + (("sum_partials",) if how == "full" else ())
    with torch_gdn_enabled() as transformers, kernels_run(device, *kernels), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = losses(model, device)
        taken = transformers.status().taken
    assert taken["causal_conv1d_fn"] == taken["rms_norm_gated"] == taken["chunk_gated_delta_rule"] >= STEPS
    for x, y in zip(found, expected, strict=True):
        assert abs(x - y) < 1e-4


def test_each_parameter_has_the_gradient_of_transformers(device: torch.device) -> None:
    def gradients(model: Any, device: torch.device) -> dict[str, Tensor]:
        tokens = random_tokens(2, 40).to(device)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: x.grad.cpu().double() for name, x in model.named_parameters() if x.grad is not None}

    model = random_model(KIND)
    expected = gradients(copy.deepcopy(model).double(), torch.device("cpu"))
    with torch_gdn_enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = gradients(model.to(device), device)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert relative_error(x, expected[name]) < 2e-5, name
