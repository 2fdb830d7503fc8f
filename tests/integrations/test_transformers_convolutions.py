"""Tests models of other rules: enable() takes their short convolutions and Kimi Delta Attention, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.models import random_tokens, torch_gdn_enabled
from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.patches import DELTA_LAYERS, KDA_IN_THE_MODULE, KDA_MODELS, modeling_module
from torch_gdn.integrations.transformers.small_models import OTHERS, make

BLOCKS = {"kimi_linear": "KimiLinearMoE.forward", "bailing_hybrid": "BailingHybridMoE.forward"}  # blocks with groups
LONG = {"lfm3": 7}  # widths that the ops do not have


def logits(model: Any) -> Tensor:
    """Returns the logits of a prompt's next token, and of three more."""
    tokens = random_tokens(2, 17)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    return torch.stack(model.generate(tokens, max_new_tokens=4, **options).logits)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", OTHERS)
def test_logits_are_those_of_the_fallback(kind: str) -> None:
    if modeling_module(kind) is None:
        pytest.skip(f"this transformers has no {kind}")
    model = make(kind, **({"conv_L_cache": 4} if kind in LONG else {}))
    expected = logits(model)
    with torch_gdn_enabled() as transformers:
        result, status = logits(model), transformers.status()
    assert expected.std() > 0.01
    assert ((result - expected).norm() / expected.norm()).item() < 2e-6
    rule = KDA_IN_THE_MODULE if kind in KDA_MODELS else {}
    assert set(status.ran) == {"causal_conv1d_fn", "causal_conv1d_update", *rule.values()} and not status.fallbacks
    assert status.ran["causal_conv1d_update"] == 3 * status.ran["causal_conv1d_fn"]
    others = tuple(f"{ending}.forward" for ending in ("RMSNorm", "MLP", *DELTA_LAYERS))
    functions = {name for name in status.replaced[kind] if not name.endswith(others)}
    blocks = {BLOCKS[kind]} if kind in BLOCKS else set()
    assert functions == {"causal_conv1d_fn", "causal_conv1d_update", *rule, *blocks}


@pytest.mark.parametrize("kind", LONG)
def test_a_longer_convolution_is_left_with_a_reason(kind: str) -> None:
    if modeling_module(kind) is None:
        pytest.skip(f"this transformers has no {kind}")
    model, reason = make(kind), f"weight: expected W from 2 to 4, got {LONG[kind]}"
    expected = logits(model)
    with torch_gdn_enabled() as transformers, pytest.warns(UserWarning, match=reason):
        result, status = logits(model), transformers.status()
    assert torch.equal(result, expected)
    assert status.fallbacks == {"causal_conv1d_fn": {reason: 1}, "causal_conv1d_update": {reason: 3}} and not status.ran
    assert f"causal_conv1d_update: 3 calls went to transformers: {reason}" in str(status)


LATENT_QUERIES = {"q_lora_rank": 16, "num_mtp_layers": 1}  # the larger Ling 3, since transformers 5.24


@pytest.mark.skipif(versions.minor(versions.installed()) < (5, 24), reason="this version has no such configuration")
def test_a_model_with_latent_queries() -> None:
    model = make("bailing_hybrid", **LATENT_QUERIES)
    assert any("q_a_proj" in name for name, _ in model.named_parameters())
    expected = logits(model)
    with torch_gdn_enabled() as transformers:
        result, status = logits(model), transformers.status()
    assert ((result - expected).norm() / expected.norm()).item() < 2e-6
    assert {*KDA_IN_THE_MODULE.values()} < set(status.ran) and not status.fallbacks


@pytest.mark.skipif(versions.minor(versions.installed()) < (5, 24), reason="earlier versions keep the model's dtype")
@pytest.mark.parametrize("kind", KDA_MODELS[:2])
def test_gates_and_routers_in_float32(kind: str) -> None:
    """The models keep A_log, dt_bias and the router's weight in float32 when the rest is loaded in bfloat16."""
    model = make(kind)
    names = [name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias", "gate.weight"))]
    model = model.bfloat16()
    for name in names:
        module, _, parameter = name.rpartition(".")
        getattr(model.get_submodule(module), parameter).data = model.get_parameter(name).float()
    expected = logits(model)
    with torch_gdn_enabled() as transformers:
        result, status = logits(model), transformers.status()
    assert {*KDA_IN_THE_MODULE.values()} < set(status.ran) and not status.fallbacks
    assert 0 < ((result - expected).norm() / expected.norm()).item() < 2e-2
