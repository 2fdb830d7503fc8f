"""Tests that a forward-mode gradient goes through transformers' own code, which has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.integrations import models
from tests.integrations.models import distance, random_model, torch_gdn_enabled
from torch_gdn.integrations import transformers

SOME = [kind for kind in ("qwen3_5", "olmo_hybrid") if models.available(kind)]  # experts have no tangent in PyTorch


def input_tangent(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, 6, model.config.hidden_size, device=model.device)
    f: Callable[[Tensor], Tensor] = lambda x: model(inputs_embeds=x, use_cache=False).logits  # noqa: E731
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


def weight_tangent(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, 6, model.config.hidden_size, device=model.device)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    tangents = {name: torch.ones_like(weight) * 1e-2 for name, weight in weights.items()}

    def f(weights: dict[str, Tensor]) -> Tensor:
        options = {"inputs_embeds": x, "use_cache": False}
        return torch.func.functional_call(model, weights, kwargs=options, tie_weights=False).logits

    return torch.func.jvp(f, (weights,), (tangents,))


@pytest.mark.parametrize("with_respect_to", [input_tangent, weight_tangent])
@pytest.mark.parametrize("kind", SOME)
def test_a_models_tangent_is_that_without_torch_gdn(
    kind: str, with_respect_to: Callable[[torch.nn.Module], tuple[Tensor, Tensor]]
) -> None:
    model = random_model(kind, attn_implementation="eager").requires_grad_(False)  # the only one with a tangent
    torch.manual_seed(0)
    expected, expected_tangent = with_respect_to(model)
    with torch_gdn_enabled():
        torch.manual_seed(0)
        result, tangent = with_respect_to(model)
        status = str(transformers.status())
    assert expected_tangent.abs().max() > 1e-3
    assert distance(result, expected) < 1e-5 and distance(tangent, expected_tangent) < 1e-4
    assert "forward-mode gradient" in status
