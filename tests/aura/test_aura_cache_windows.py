"""Tests sliding windows held as codes, with and without padding: how long they are kept, and what crop can remove."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from tests.aura.test_aura_cache import COMMON, PADDED, PROMPT, aura_cache, decoded_cache, logits_of, model_of
from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import assert_close, relative_error
from torch_gdn.aura import Scheme
from torch_gdn.integrations.transformers.aura import window_of
from torch_gdn.integrations.transformers.aura_layers import Options, WindowLayer
from torch_gdn.integrations.transformers.versions import with_cache

WINDOW = 4  # the window of the second layer of model_of("window")
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def held(cache: Any) -> int:
    return len(cache.layers[1].cache)


def test_a_window_is_coded_and_holds_what_is_seen() -> None:
    model = model_of("window")
    cache = aura_cache(model, "8v4")
    assert isinstance(cache.layers[1], WindowLayer)
    logits_of(model, cache)
    assert cache.get_seq_length() == cache.layers[1].get_seq_length() == 11
    assert held(cache) == WINDOW
    assert cache.layers[1].cache.capacity == WINDOW
    codes, exact = 8 + WINDOW - 2, 3 + 2  # a window has no sinks
    assert cache.bytes_used == 2 * 2 * (codes * (64 + 32 + 4) + exact * 2 * 64 * 4)


def test_a_mask_of_another_kind_has_no_window() -> None:
    def whole(*place: Any) -> bool:
        return True

    assert window_of(sliding_window_causal_mask_function(WINDOW)) == WINDOW
    for parts in ((sliding_window_overlay(WINDOW), whole), (whole, causal_mask_function)):
        assert window_of(and_masks(*parts)) is None


@pytest.mark.parametrize("implementation", ["aura", "sdpa"])
def test_a_long_answer(implementation: str) -> None:
    """The answer is many times as long as the window, and the window takes no more memory."""
    model = model_of("window")
    plain = decoded_cache(model, "8v4", exact_prompt=implementation == "sdpa")
    expected = model.generate(PROMPT, attention_mask=PADDED, **with_cache(plain), max_new_tokens=30, **OPTIONS)
    cache = aura_cache(model, "8v4")
    model.set_attn_implementation(implementation)
    tokens = model.generate(PROMPT, attention_mask=PADDED, **with_cache(cache), max_new_tokens=30, **OPTIONS)
    assert torch.equal(tokens, expected)
    assert cache.layers[1].cache.capacity == WINDOW
    assert cache.get_seq_length() == 40


def test_codes_of_a_window_leave_in_whole_tiles() -> None:
    """The mask has as many keys as update() returns."""
    config = model_of("window").config
    config._attn_implementation = "sdpa"
    layer, window = WindowLayer(config, Options(Scheme("8v8"), 128, 4), 0, 200), 200
    k = torch.randn(1, 2, 900, 64)
    for tokens in (300, *[1] * 150, 250, 3):
        length, first = layer.get_mask_sizes(tokens)
        result, _ = layer.update(k[:, :, layer.seen : layer.seen + tokens], k[:, :, layer.seen : layer.seen + tokens])
        assert result.shape[2] == length and first + length == layer.seen
        assert min(layer.seen, window) <= length < window + 128 + tokens
        assert_close("keys", result, k[:, :, first : layer.seen].double(), 0.01, head_dim=1)


def test_drafts_are_taken_back() -> None:
    """Prompt lookup makes the drafts. A recording window loses no token before `crop`."""
    model, prompt = model_of("window"), torch.cat([PROMPT[1:], PROMPT[1:]], 1)
    expected = model.generate(
        prompt, **with_cache(decoded_cache(model, "8v4", exact_prompt=True)), max_new_tokens=20, **OPTIONS
    )
    cache = aura_cache(model, "8v4")
    options = OPTIONS | {"eos_token_id": 64, "prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    assert torch.equal(model.generate(prompt, **with_cache(cache), **options), expected)
    assert cache.layers[1].cache.capacity <= WINDOW + 1 + 3 + WINDOW


def test_a_recording_window_keeps_what_several_calls_brought() -> None:
    """A draft model needs this, because all of its tokens may be taken back at once."""
    model, rest = model_of("window"), [(8, 9), (9, 10), (10, 11)]
    cache = aura_cache(model, "8v4", tail=0)  # with a tail, the newest token after a crop would stay a code
    with torch.no_grad():
        model(PROMPT[:, :8], **with_cache(cache))
        cache.layers[1].activate_past_recording()
        expected = [model(PROMPT[:, a:b], **with_cache(cache)).logits for a, b in rest]
        cache.crop(-3)
        assert cache.layers[1].get_seq_length() == 8
        result = [model(PROMPT[:, a:b], **with_cache(cache)).logits for a, b in rest]
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_what_is_gone_is_not_brought_back() -> None:
    model = model_of("window")
    cache = aura_cache(model, "8v4")
    logits_of(model, cache)
    cache.layers[1].crop(-1)
    assert cache.layers[1].get_seq_length() == 10
    message = "at most 0 tokens of the sliding window of layer 1 to be removed, got 2"
    with pytest.raises(ValueError, match=message):
        cache.layers[1].crop(-2)


def test_a_window_that_is_not_full_is_cropped_anywhere() -> None:
    model = model_of("window")
    cache = aura_cache(model, "8v4", tail=0)
    with torch.no_grad():
        model(PROMPT[:, :3], **with_cache(cache))
        cache.crop(-2)
        result = model(PROMPT[:, 3:8], **with_cache(cache)).logits
        expected = model(PROMPT[:, [0, 3, 4, 5, 6, 7]], **with_cache(aura_cache(model, "8v4", tail=0))).logits[:, 1:]
    assert relative_error(result, expected) < 1e-3  # a code may round the other way
    cache.reset()
    assert (cache.layers[1].get_seq_length(), held(cache)) == (0, 0)


def test_on_mps() -> None:
    model, device = model_of("window"), ready("mps")
    expected = logits_of(model, decoded_cache(model, "8v4"))
    cache = aura_cache(model.to(device), "8v4")
    with kernels_run(device, "aura_encode", "aura_flash_p1"):
        assert relative_error(logits_of(model, cache), expected) < 2e-5


def test_layers_of_windows_alone() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    model = MistralForCausalLM(MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=5)).eval()
    expected = logits_of(model, decoded_cache(model, "4v4t"))
    uncoded = logits_of(model, DynamicCache(config=model.config))
    assert relative_error(uncoded, expected) > 1e-3
    assert relative_error(logits_of(model, aura_cache(model, "4v4t")), expected) < 2e-5


def test_sinks_and_windows_of_gpt_oss() -> None:
    """As in OpenAI's models, every second layer has a window, and all layers have sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(1)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "num_hidden_layers": 2}
    model = GptOssForCausalLM(GptOssConfig(**COMMON, **layers, num_local_experts=2, num_experts_per_tok=1)).eval()
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data.normal_(0, 2)
    model.set_attn_implementation("eager")
    expected = logits_of(model, decoded_cache(model, "4v4"))
    assert relative_error(logits_of(model, aura_cache(model, "4v4")), expected) < 2e-5
