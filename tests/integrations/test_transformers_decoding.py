"""Tests that a Gated DeltaNet layer of transformers decodes in two launches between its projections, on mps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.operations import CountedOperations
from tests.integrations import models
from tests.integrations.models import distance, random_model, torch_gdn_enabled
from tests.integrations.serving import other_version
from torch_gdn.integrations.transformers.decoding import form_of
from torch_gdn.integrations.transformers.versions import CACHE_NAMES, cache_in

if reason := other_version("decoding of whole layers"):
    pytest.skip(reason, allow_module_level=True)

CPU = torch.device("cpu")
KINDS = [kind for kind in ("qwen3_next", "qwen3_5", "qwen4_exp", "olmo_hybrid") if models.available(kind)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_the_fallback(kind: str) -> None:
    """The dtype is float32. Left padding makes the prompts unequal. Every token of the answer is decoded."""
    model = random_model(kind)
    expected, tokens = models.decode(model, CPU, batch=2), models.generated(model, CPU).tolist()
    on_device = copy.deepcopy(model).to(ready("mps"))
    with torch_gdn_enabled() as transformers:
        result = models.decode(on_device, ready("mps"), batch=2)
        assert transformers.status().ran["gdn_decode"] == 3
        assert models.generated(on_device, ready("mps")).tolist() == tokens
        status = transformers.status()
    assert distance(result, expected) < 4e-6
    assert status.ran["gdn_decode"] == 3 + 5 and not status.fallbacks
    assert "fused_recurrent_gated_delta_rule" not in status.ran


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bf16_is_as_near_to_float32_as_the_fallback(kind: str) -> None:
    exact = models.decode(random_model(kind), CPU, batch=8)
    model = random_model(kind, torch.bfloat16)
    fallback = distance(models.decode(model, CPU, batch=8), exact)
    with torch_gdn_enabled():
        result = models.decode(model.to(ready("mps")), ready("mps"), batch=8)
    assert distance(result, exact) < 1.02 * fallback


def prompted(model: Any) -> tuple[Any, Tensor]:
    tokens = models.random_tokens(2, 9).to(model.device)
    return cache_in(model(input_ids=tokens[:, :-1], use_cache=True)), tokens[:, -1:]


def gdn_layer(model: Any) -> Any:
    return next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))


@pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_takes_two_launches_and_its_projections(kind: str) -> None:
    model = random_model(kind, torch.bfloat16).to(ready("mps"))
    layer = gdn_layer(model)
    x = torch.randn(2, 1, 64, dtype=torch.bfloat16).to("mps")
    with torch_gdn_enabled():
        cache, _ = prompted(model)
        states = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
        before = [state.clone() for state in states]
        with profiled() as profile, CountedOperations() as counted:
            layer(x, **{CACHE_NAMES.delta_net: cache})
    form = form_of(layer)
    assert form is not None
    assert counted.calls == {"mm": len(form.inputs) + 1, "gdn_decode_": 1}
    launched = {name.split("_bfloat")[0]: kernel.dispatches for name, kernel in profile.kernels.items()}
    assert launched == {"causal_conv1d_update": 1, "gdn_decode": 1}
    assert states[0] is cache.layers[0].conv_states[0] and states[1] is cache.layers[0].recurrent_states[0]
    assert not any(torch.equal(*pair) for pair in zip(states, before, strict=True))


@pytest.mark.parametrize("how", ["a hook", "a mask", "a recording cache"])
@torch.no_grad()
def test_other_calls_are_decoded_function_by_function(how: str) -> None:
    model = random_model("qwen3_5").to(ready("mps"))
    layer, calls = gdn_layer(model), []
    x = torch.randn(2, 1, 64).to("mps")
    with torch_gdn_enabled() as transformers:
        cache, _ = prompted(model)
        other = copy.deepcopy(cache)
        expected, options = layer(x, **{CACHE_NAMES.delta_net: other}), {}
        assert transformers.status().ran["gdn_decode"] == 1
        if how == "a hook":
            layer.norm.register_forward_hook(lambda *args: calls.append(1))
        elif how == "a mask":
            options["attention_mask"] = torch.ones(2, 1, device="mps")
        else:
            cache.layers[0].record_past = True
        result = layer(x, **{CACHE_NAMES.delta_net: cache}, **options)
        assert transformers.status().ran["gdn_decode"] == 1
    assert distance(result, expected) < 2e-6 and len(calls) == (how == "a hook")
