"""Tests that models with PEFT's adapters on mps have the logits and the gradients that they have without torch_gdn.

PEFT's layers and copies of layers take the place of modules that torch_gdn's paths compute together.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import ready
from tests.helpers.errors import relative_error
from tests.integrations import models
from tests.integrations.models import decode, random_model, random_tokens, torch_gdn_enabled

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'peft>=0.21'")

KINDS = [kind for kind in ("qwen3_next", "qwen3_5_moe") if models.available(kind)]
NEAR = 2e-5  # relative error that another order of float32 sums causes
PROJECTIONS = ["in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"]


def lora(**options: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]} | options))


CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA on the projections of the Gated DeltaNet layers": lora(target_modules=PROJECTIONS),
    "LoRA on the projections of attention": lora(target_modules=ATTENTION),
    "LoRA on every linear layer": lora(target_modules="all-linear"),
    "a copy of the last norm": lora(modules_to_save=["norm"]),
    "a copy of post_attention_layernorm": lora(modules_to_save=["post_attention_layernorm"]),
    "a copy of q_norm": lora(modules_to_save=["q_norm"]),
    "LayerNorm tuning": lambda: peft.LNTuningConfig(target_modules=NORMS),
    "LoRA on the router's weight": lora(target_parameters=["mlp.gate.weight"]),
    "LoRA on the experts' weights": lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
}


def adapted(kind: str, config: str) -> Any:
    """Returns a model with an adapter whose numbers are as large as those of the layers, so that it matters."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = peft.get_peft_model(random_model(kind), CONFIGS[config]())
    for x in model.parameters():
        if x.requires_grad:
            x.data += 0.1 * torch.randn(x.shape)
    return model


def loss_gradients(model: Any, device: torch.device) -> dict[str, Tensor]:
    tokens = random_tokens(2, 40).to(device)
    model.train()
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}


def logits(model: Any, device: torch.device) -> Tensor:
    """Returns the logits of a prompt and of the tokens after it."""
    with torch.no_grad():
        return decode(model.eval(), device).cpu()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_changes_what_it_changes_without_torch_gdn(kind: str, config: str) -> None:
    device, model = ready("mps"), adapted(kind, config)
    expected, expected_gradients = logits(model, torch.device("cpu")), loss_gradients(model, torch.device("cpu"))
    on_device = copy.deepcopy(model).to(device)
    with torch_gdn_enabled() as transformers, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result, gradients = logits(on_device, device), loss_gradients(on_device, device)
        ran = transformers.status().ran
    assert relative_error(result, expected.double()) < NEAR
    assert gradients.keys() == expected_gradients.keys() and gradients
    for name, x in gradients.items():
        assert relative_error(x, expected_gradients[name].double()) < NEAR, name
    assert ran["chunk_gated_delta_rule"] > 0
