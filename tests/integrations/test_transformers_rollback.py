"""Tests assisted generation of hybrid models: tokens and logits equal greedy decoding's, whatever is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.devices import kernels_run, ready
from tests.integrations import models
from tests.integrations.models import DRAFTED_KINDS, distance, random_model, random_tokens
from tests.integrations.serving import (
    DRAFTS,
    GREEDY_TOKENS,
    assert_drafts_change_nothing,
    greedy,
    other_version,
)
from tests.integrations.test_transformers import BAR
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers.patches import DELTA_LAYERS
from torch_gdn.integrations.transformers.versions import with_cache

if reason := other_version("rollback"):
    pytest.skip(reason, allow_module_level=True)

each_kind = pytest.mark.parametrize("kind", DRAFTED_KINDS)
pytestmark = [pytest.mark.sweep(8), pytest.mark.usefixtures("serving")]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
@each_kind
def test_any_number_of_drafts_is_taken_back(kind: str, accepted: int) -> None:
    steps = assert_drafts_change_nothing(random_model(kind), random_tokens(1, 20), [accepted])
    assert steps == -(-GREEDY_TOKENS // (accepted + 1))


@pytest.mark.parametrize("prompt", [1, 2, 63, 70, 71, 200], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear"])
def test_drafts_behind_prompts_of_any_length(kind: str, prompt: int) -> None:
    """A prompt may be shorter than the convolution. The drafts' call may include it, so that only its end is taken
    back.
    """
    assert_drafts_change_nothing(random_model(kind), random_tokens(1, prompt), [0, 3, 8, 1])


@pytest.mark.parametrize("device_name", ["cpu", "mps"])
@each_kind
def test_prompt_lookup(kind: str, device_name: str) -> None:
    prompt = random_tokens(1, 12).repeat(1, 3)
    assert_drafts_change_nothing(random_model(kind), prompt, device=ready(device_name), prompt_lookup_num_tokens=5)


@pytest.mark.parametrize("seed", [0, 1], ids=["the model itself", "another"])
@each_kind
def test_a_draft_model(kind: str, seed: int) -> None:
    """The draft model is a hybrid too. It decodes token by token, and takes back all rejected tokens at once."""
    draft = random_model(kind, seed=seed)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    assert_drafts_change_nothing(random_model(kind), random_tokens(1, 20), assistant_model=draft)


@each_kind
def test_on_mps(kind: str) -> None:
    device = ready("mps")
    with kernels_run(device, "fused_recurrent_gated_delta_rule", "causal_conv1d"):
        assert_drafts_change_nothing(random_model(kind), random_tokens(1, 17), [0, 8, 3], device)


def cached(model: Any, tokens: torch.Tensor, *parts: int) -> Any:
    """Returns a recording cache after these tokens, given in parts."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for part in tokens.split(parts, 1):
        model(input_ids=part, use_cache=True, **with_cache(cache))
    return cache


def states(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.layers[0].recurrent_states[0], cache.layers[0].conv_states[0]


@pytest.mark.parametrize("taken", [0, 1, 5, 9])
def test_states_are_those_of_the_tokens_that_stay(taken: int) -> None:
    model, tokens = random_model("qwen3_5"), random_tokens(1, 109)
    transformers.enable(rollback=True)
    cache = cached(model, tokens, 100, 3, 1, 5)
    expected = cached(model, tokens[:, : 109 - taken], 109 - taken)
    cache.crop(-taken)
    expected.crop(0)
    for result, exact in zip(states(cache), states(expected), strict=True):
        assert result.shape == exact.shape
        assert distance(result, exact) < BAR


def test_a_whole_cache_is_taken_back() -> None:
    model, tokens = random_model("qwen3_5"), random_tokens(1, 9)
    transformers.enable(rollback=True)
    cache = cached(model, tokens, 9)
    cache.crop(-9)
    assert not states(cache)[0].any()


def test_more_than_is_kept_is_refused() -> None:
    model, tokens = random_model("qwen3_5"), random_tokens(1, 200)
    transformers.enable(rollback=True)
    cache = cached(model, tokens, 200)
    with pytest.raises(ValueError, match="tokens_to_remove: expected at least -72, got -73"):
        cache.crop(-73)


def test_what_was_cropped_is_forgotten() -> None:
    """The cache keeps states for the tokens since the last crop, not for the whole text."""
    model, tokens = random_model("qwen3_5"), random_tokens(1, 30)
    transformers.enable(rollback=True)
    cache = cached(model, tokens, 20, 10)
    history = vars(cache.layers[0])["torch_gdn_history"]
    assert sum(part[0].shape[1] for part in history.since) == 30
    cache.crop(-3)
    assert history.since == []


def test_a_reset_cache_starts_from_zeros() -> None:
    model, tokens = random_model("qwen3_5"), random_tokens(1, 30)
    transformers.enable(rollback=True)
    cache = cached(model, tokens, 20, 10)
    cache.reset()
    model(input_ids=tokens[:, :7], use_cache=True, **with_cache(cache))
    cache.crop(-2)
    expected = cached(model, tokens[:, :5], 5)
    assert distance(states(cache)[0], states(expected)[0]) < BAR


@pytest.mark.parametrize("trained", ["in_proj_qkv", "in_proj_b"])  # the convolution or the rule alone gets a gradient
def test_what_torch_gdn_would_not_take_is_an_error(trained: str) -> None:
    """transformers' own rule would leave the rejected tokens in the state."""
    model, tokens = random_model("qwen3_5"), random_tokens(1, 9)
    for name, weight in model.named_parameters():
        weight.requires_grad_(f"{trained}." in name)
    transformers.enable(rollback=True)
    with torch.enable_grad(), pytest.raises(ValueError, match="that torch_gdn holds: grad mode is on"):
        cached(model, tokens, 9)


def test_disable_refuses_again() -> None:
    before = [vars(x) | {} for x in classes()]
    model, prompt = random_model("qwen3_5"), random_tokens(1, 5)
    assert transformers.enable(rollback=True, continuous_batching=True).replaced["rollback"]
    greedy(model, prompt, prompt_lookup_num_tokens=2)
    transformers.disable()
    assert [vars(x) | {} for x in classes()] == before
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, prompt, prompt_lookup_num_tokens=2)


def classes() -> list[type]:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    endings = (*DELTA_LAYERS, "PreTrainedModel")
    result = [
        y for kind in DRAFTED_KINDS for name, y in vars(models.modeling_module(kind)).items() if name.endswith(endings)
    ]
    return [LinearAttentionCacheLayerMixin, *result]
