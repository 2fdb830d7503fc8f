"""Tests RMS norms of transformers' models on mps: each is one launch, and gives the numbers of the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.devices import ready
from tests.helpers.errors import assert_close
from tests.helpers.operations import CountedOperations
from tests.integrations.models import KINDS, available, prefill, random_model, torch_gdn_enabled
from torch_gdn.integrations.transformers import norms
from torch_gdn.integrations.transformers.norms import Form
from torch_gdn.integrations.transformers.patches import KDA_MODELS, modeling_module

BOUND = {torch.float32: 4e-7, torch.bfloat16: 2.4e-3}
NORMS = {"qwen3_next": "Qwen3NextRMSNorm", "olmo_hybrid": "OlmoHybridRMSNorm", "kimi_linear": "KimiLinearRMSNorm"}


def norm_of(kind: str) -> Any:
    if not available(kind):
        pytest.skip(f"this transformers has no {kind}")
    norm = getattr(modeling_module(kind), NORMS[kind])(96)
    nn.init.normal_(norm.weight)
    return norm.requires_grad_(False)


def exact(kind: str, x: Tensor, weight: Tensor) -> Tensor:
    normed = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed * (weight.double() + (1 if kind == "qwen3_next" else 0))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_has_the_numbers_of_the_models_own(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    norm, x = norm_of(kind).to(dtype), torch.randn(2, 3, 96).to(dtype)
    own = norm(x)
    with torch_gdn_enabled(), CountedOperations() as counted:
        y = norm.to(device)(x.to(device)).cpu()
    assert counted.calls["rms_norm"] == (device.type == "mps")
    assert y.dtype == dtype
    assert_close("y", y, exact(kind, x, norm.weight.cpu()), BOUND[dtype], head_dim=None)
    # If a norm rounds elsewhere than the model's own, a third of its values differ in bfloat16.
    assert (y != own).float().mean() < (0.5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_norm_of_a_model_is_one_launch(kind: str) -> None:
    device = ready("mps")
    model = random_model(kind)
    calls: list[Any] = []
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "group_size", None) is None:
            module.register_forward_hook(lambda module, args, y: calls.append(module))
    expected = prefill(model, torch.device("cpu"))
    expected_calls = len(calls)
    with torch_gdn_enabled(), CountedOperations() as counted:
        result = prefill(copy.deepcopy(model).to(device), device).cpu()
    assert counted.calls["rms_norm"] == expected_calls > 3
    assert_close("logits", result, expected.double(), 2e-5, head_dim=None)


@pytest.mark.parametrize("kind", NORMS)
def test_a_weight_wider_than_the_rows(kind: str) -> None:
    """Kimi Linear's norm then returns the weight's dtype, which torch_gdn's op does not."""
    norm, x = norm_of(kind), torch.randn(2, 3, 96).bfloat16()
    own = norm(x)
    with torch_gdn_enabled() as integration:
        y = norm.to(ready("mps"))(x.to("mps")).cpu()
        ran, fallbacks = integration.status().ran, integration.status().fallbacks
    assert (ran.get("rms_norm", 0), list(fallbacks)) == ((0, ["rms_norm"]) if kind == "kimi_linear" else (1, []))
    assert y.dtype == own.dtype
    assert_close("y", y, exact(kind, x, norm.weight.cpu()), BOUND[torch.bfloat16], head_dim=None)


def test_a_class_that_rounds_a_wider_weight_does_not_keep_it() -> None:
    class RoundingRMSNorm(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            return (self.weight.to(x.dtype).float() * y).to(x.dtype)

    assert norms.find_form(RoundingRMSNorm) == Form(zero_centered=False, round_norm=False, keeps_dtype=False)


def test_grad_is_taken_and_compiled_graphs_stay_with_transformers() -> None:
    device = ready("mps")
    norm, x = norm_of("qwen3_next").to(device), torch.randn(2, 96).to(device)
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    norm.requires_grad_()(x).square().sum().backward()
    expected, norm.weight.grad = norm.weight.grad, None
    with torch_gdn_enabled() as integration:
        norm(x).square().sum().backward()
        torch.testing.assert_close(norm.weight.grad.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)
        norm.requires_grad_(False)
        torch.compile(norm, fullgraph=True, backend=keep)(x)
        assert integration.status().ran["rms_norm"] == 1 and not integration.status().fallbacks
        norm(x)
        assert integration.status().ran["rms_norm"] == 2
    (graph,) = graphs
    assert not any("rms_norm" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *KDA_MODELS) if available(kind)])
def test_the_form_of_each_models_norm_is_known(kind: str) -> None:
    module = modeling_module(kind)
    assert module is not None
    (form, *others) = {norms.known_form(owner) for owner in norms.norm_classes(module)}
    assert not others
    zero_centered = kind.startswith("qwen")
    rounds = not zero_centered and kind not in ("lara_mini", "olmo_hybrid")
    assert form == Form(zero_centered, round_norm=rounds, keeps_dtype=not rounds)
