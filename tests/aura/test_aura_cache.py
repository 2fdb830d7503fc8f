"""Tests AuraCache in transformers' models: the logits equal those of a model with decoded keys and values."""

from __future__ import annotations

import doctest
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

import torch_gdn.integrations.transformers
import torch_gdn.integrations.transformers.aura
from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import relative_error
from torch_gdn import reference
from torch_gdn.aura import KVCache, Scheme, codebooks
from torch_gdn.integrations.transformers.aura import AuraCache, Codes, aura_attention, could_be_codes, warn_of_tensors
from torch_gdn.integrations.transformers.versions import CACHE_NAMES, OLD_NAMES, with_cache

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
PROMPT = torch.tensor([[0, 0, 0, 5, 9, 33, 2, 7, 11, 60, 3], [8, 1, 4, 63, 12, 7, 7, 30, 21, 2, 9]])
PADDED = torch.tensor([[0] * 3 + [1] * 8, [1] * 11])


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=2))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, num_hidden_layers=2))
    elif kind == "window":  # the second layer sees 4 positions
        layers = ["full_attention", "sliding_attention"]
        options = {"use_sliding_window": True, "sliding_window": 4, "layer_types": layers}
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, num_hidden_layers=2, **options))
    elif kind == "gpt_oss":
        layers = ["full_attention"] * 2
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        model = GptOssForCausalLM(GptOssConfig(**COMMON, num_hidden_layers=2, layer_types=layers, **experts))
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.data.normal_(0, 2)
    else:
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 0}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, num_hidden_layers=4, **linear, **sizes))
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 8  # otherwise every score is about 0, and attention is a mean of the values
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.2  # no default has this value
    return model.eval()


class Decoded:
    """A layer that encodes and decodes its keys and values with the references, except the sinks and the tail. A whole
    tile leaves the tail when more tokens after the sinks are exact than the tail and one tile hold."""

    def __init__(
        self, scheme: Scheme, index: int, sinks: int, tail: int, *, exact_prompt: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.scheme, self.index, self.sinks, self.tail, self.coded_to = scheme, index, sinks, tail, sinks
        self.exact_prompt = exact_prompt and tail > 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen = self.get_seq_length()
        total = seen + key_states.shape[2]
        self.coded_to = max(self.sinks, min(self.coded_to, seen))  # after a crop
        while total - self.coded_to > 2 * self.tail:
            self.coded_to += self.tail or total - self.coded_to
        keys, values = super().update(key_states, value_states)
        if seen == 0 and self.exact_prompt:
            return keys, values
        positions = torch.arange(total - keys.shape[2], total)[:, None]
        coded = (positions >= self.sinks) & (positions < self.coded_to)
        coded_keys, coded_values = (self.through_codes(x, which) for which, x in enumerate((keys, values)))
        return torch.where(coded, coded_keys, keys), torch.where(coded, coded_values, values)

    def through_codes(self, x: Tensor, which: int) -> Tensor:
        signs = reference.aura_signs(x.shape[-1], 2 * self.index + which)
        centroids = self.scheme.codebooks(x.shape[-1])[which]
        codes, norms = reference.aura_encode(x, signs, codebooks.boundaries(centroids), centroids)
        return reference.aura_decode(codes, norms.half(), centroids, signs, dtype=torch.float32).to(x.dtype)


class DecodedLayer(Decoded, DynamicLayer): ...


class DecodedWindow(Decoded, DynamicSlidingWindowLayer): ...


EXACT = {"tail": 1, "sinks": 1}  # 8 of 11 tokens become codes


def decoded_cache(
    model: PreTrainedModel, scheme: str, tail: int = 1, sinks: int = 1, *, exact_prompt: bool = False
) -> DynamicCache:
    """Pass exact_prompt if the first prompt has no padding."""
    prompt = {"exact_prompt": exact_prompt}
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = DecodedLayer(Scheme(scheme), i, sinks, tail, **prompt)
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[i] = DecodedWindow(Scheme(scheme), i, 0, tail, sliding_window=layer.sliding_window, **prompt)
    return cache


def aura_cache(model: PreTrainedModel, scheme: str, **options: Any) -> AuraCache:
    model.set_attn_implementation("aura")
    return AuraCache(model.config, scheme, **EXACT | options)


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: Any, mask: Tensor | None = None) -> Tensor:
    """Prefills 8 tokens, continues with 2 and decodes 1. Returns the logits of all tokens but padding, on the CPU."""
    device = model.device
    prompt, result = PROMPT.to(device), []
    mask = PADDED if mask is None else mask
    for first, last in ((0, 8), (8, 10), (10, 11)):
        seen = mask[:, :last].to(device)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, first:last]
        output = model(prompt[:, first:last], attention_mask=seen, position_ids=positions, **with_cache(cache))
        result.append(output.logits.float().cpu())
    return torch.cat(result, 1)[mask.bool()]


@pytest.mark.parametrize("scheme", ["8v4", "2v2t", "5v5"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3", "llama", "window"])
def test_logits_are_those_of_decoded_keys_and_values(kind: str, scheme: str) -> None:
    model = model_of(kind)
    expected = logits_of(model, decoded_cache(model, scheme))
    uncoded = logits_of(model, DynamicCache(config=model.config))
    assert relative_error(uncoded, expected) > 1e-3  # the codes matter
    logits = logits_of(model, aura_cache(model, scheme))
    assert relative_error(logits, expected) < 2e-5


@pytest.mark.parametrize(("tail", "sinks"), [(0, 0), (3, 0), (0, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["qwen3_next", "window"])
def test_logits_without_padding(kind: str, tail: int, sinks: int) -> None:
    tail = min(tail, 1) if kind == "window" else tail  # a longer tail would be all that the window of 4 sees
    model = model_of(kind)
    everything = torch.ones_like(PADDED)
    expected = logits_of(model, decoded_cache(model, "4v4", tail, sinks, exact_prompt=True), everything)
    result = logits_of(model, aura_cache(model, "4v4", tail=tail, sinks=sinks), everything)
    assert relative_error(result, expected) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "window", "gpt_oss"])
def test_a_first_prompt_without_padding_is_exact(kind: str) -> None:
    """This holds although 9 of its 11 tokens are 2-bit codes when it attends. A padded prompt sees the codes."""
    model, device = model_of(kind), ready("mps")
    model.set_attn_implementation("eager")
    expected = model(PROMPT, **with_cache(DynamicCache(config=model.config))).logits
    cache = aura_cache(model.to(device), "2v2", sinks=0)
    with kernels_run(device, "paged_attention_prefill", "aura_encode"):
        result = model(PROMPT.to(device), **with_cache(cache)).logits.cpu()
    assert relative_error(result, expected) < 2e-5
    assert cache.layers[0].cache.coded == 9
    padded = model(PROMPT.to(device), attention_mask=PADDED.to(device), **with_cache(aura_cache(model, "2v2")))
    assert relative_error(padded.logits[1].cpu(), expected[1]) > 0.01


def test_a_short_conversation_is_exact() -> None:
    model = model_of("qwen3")
    expected = logits_of(model, DynamicCache(config=model.config))
    model.set_attn_implementation("aura")
    assert relative_error(logits_of(model, AuraCache(model.config, "2v2")), expected) < 2e-6


@pytest.mark.parametrize("device_name", ["cpu", "mps"])
def test_all_of_a_hybrid_on_torch_gdn(device_name: str) -> None:
    """Attention layers run on codes. The other layers run on torch_gdn through the switch for transformers."""
    device = ready(device_name)
    model = model_of("qwen3_next")
    expected = logits_of(model, decoded_cache(model, "8v4"))
    cache = aura_cache(model.to(device), "8v4")
    torch_gdn.integrations.transformers.enable()
    try:
        attention = ("aura_flash_p1", "aura_flash_exact", "aura_flash_p2")
        kernels = ("fused_recurrent_gated_delta_rule", "aura_encode", *attention)
        with kernels_run(device, *kernels):
            logits = logits_of(model, cache)
    finally:
        torch_gdn.integrations.transformers.disable()
    assert relative_error(logits, expected) < 2e-5


def test_sinks_of_gpt_oss() -> None:
    model = model_of("gpt_oss")
    model.set_attn_implementation("eager")
    expected = logits_of(model, decoded_cache(model, "4v4"))
    assert relative_error(logits_of(model, aura_cache(model, "4v4")), expected) < 2e-5


def test_8_bits_change_the_logits_little() -> None:
    model = model_of("qwen3_next")
    expected = logits_of(model, DynamicCache(config=model.config))
    errors = {
        scheme: relative_error(logits_of(model, aura_cache(model, scheme)), expected) for scheme in ("8v8", "4v4")
    }
    assert errors["8v8"] < 0.02 and errors["8v8"] < errors["4v4"] / 5, errors


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate(kind: str, beams: int) -> None:
    """Generates from a batch with left padding, greedily and by beam search. The cache grows twice."""
    model = model_of(kind)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "num_beams": beams, "eos_token_id": None}
    expected = model.generate(PROMPT, attention_mask=PADDED, **with_cache(decoded_cache(model, "4v4t")), **options)
    cache = aura_cache(model, "4v4t", capacity=12)
    tokens = model.generate(PROMPT, attention_mask=PADDED, **with_cache(cache), **options)
    assert tokens.shape == (2, 23) and len(set(tokens[:, 11:].flatten().tolist())) > 3
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() == 22


def test_a_second_turn() -> None:
    """The second prompt contains the answer to the first, whose tokens are not encoded again."""
    model = model_of("qwen3_next")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def two_turns(cache: Any) -> Tensor:
        first = model.generate(PROMPT[1:], **with_cache(cache), **options)
        return model.generate(torch.cat([first, PROMPT[1:, :3]], 1), **with_cache(cache), **options)

    expected = two_turns(decoded_cache(model, "8v4", exact_prompt=True))
    tokens = two_turns(aura_cache(model, "8v4"))
    assert tokens.shape == (1, 11 + 5 + 3 + 5) and torch.equal(tokens, expected)


def test_looking_drafts_up_in_the_prompt() -> None:
    """Assisted generation crops tokens that were guessed wrong."""
    model, prompt = model_of("qwen3"), torch.cat([PROMPT[1:], PROMPT[1:]], 1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 64}
    expected = model.generate(prompt, **with_cache(decoded_cache(model, "8v4t", exact_prompt=True)), **options)
    cache = aura_cache(model, "8v4t")
    assert torch.equal(model.generate(prompt, **with_cache(cache), prompt_lookup_num_tokens=3, **options), expected)


def test_bfloat16() -> None:
    """The logits are as close to the float32 model's as those with decoded keys and values, which round elsewhere."""
    exact = logits_of(model_of("llama"), decoded_cache(model_of("llama"), "8v8"))
    model = model_of("llama").bfloat16()
    theirs = relative_error(logits_of(model, decoded_cache(model, "8v8")), exact)
    ours = relative_error(logits_of(model, aura_cache(model, "8v8")), exact)
    assert 0 < ours < 1.25 * theirs < 0.1, (ours, theirs)


def test_a_hybrid_keeps_its_states_beside_the_codes() -> None:
    model = model_of("qwen3_next")
    cache = aura_cache(model, "8v4")
    logits_of(model, cache)
    expected = decoded_cache(model, "8v4")
    logits_of(model, expected)
    assert [isinstance(layer, LinearAttentionLayer) for layer in cache.layers] == [True, True, True, False]
    for ours, theirs in zip(cache.layers[:3], expected.layers[:3], strict=True):
        assert relative_error(ours.recurrent_states[0], theirs.recurrent_states[0]) < 1e-6
    assert cache.bytes_used == 2 * 2 * (8 * (64 + 32 + 4) + 3 * 2 * 64 * 4)


def test_other_attention_gets_what_is_decoded() -> None:
    model = model_of("llama")
    everything = torch.ones_like(PADDED)
    expected = logits_of(model, aura_cache(model, "4v4"), everything)
    model.set_attn_implementation("sdpa")
    assert relative_error(logits_of(model, AuraCache(model.config, "4v4", **EXACT), everything), expected) < 2e-5


@pytest.mark.parametrize("padded", [True, False])
def test_aura_attention_without_an_aura_cache_is_sdpa(padded: bool) -> None:
    model, mask = model_of("window"), PADDED if padded else torch.ones_like(PADDED)
    expected = logits_of(model, DynamicCache(config=model.config), mask)
    model.set_attn_implementation("aura")
    assert relative_error(logits_of(model, DynamicCache(config=model.config), mask), expected) < 1e-6


@torch.no_grad()
def test_packed_sequences_without_a_cache_are_sdpas() -> None:
    """transformers finds packed sequences by their positions, and passes a mask function."""
    model = model_of("llama")
    options = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]), "use_cache": False}
    expected = model(PROMPT[:1], **options).logits
    model.set_attn_implementation("aura")
    assert relative_error(model(PROMPT[:1], **options).logits, expected) < 1e-6


def test_a_window_over_codes() -> None:
    """A model may ask for a window in a layer that its cache treats as full attention."""
    cache = KVCache("4v4", 1, 2, 64, 9, dtype=torch.float32, tail=2)
    cache.append(torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64))
    q, keys = torch.randn(1, 4, 3, 64), Codes(cache)
    o, _ = aura_attention(torch.nn.Module(), q, keys, keys, None, scaling=0.3, sliding_window=4)
    assert torch.equal(o, cache.attend(q, scale=0.3, window=4).transpose(1, 2))
    assert not torch.equal(o, cache.attend(q, scale=0.3).transpose(1, 2))


def test_cropping_the_cache() -> None:
    model = model_of("qwen3")
    cache = aura_cache(model, "8v4", tail=0)  # with a tail, the newest token after a crop would stay a code
    expected = logits_of(model, cache)[-1]
    cache.crop(-2)
    assert cache.get_seq_length() == 9
    cache.crop(0)
    assert cache.get_seq_length() == 9
    with torch.no_grad():
        positions = (PADDED.cumsum(-1) - 1)[:, 9:]
        output = model(PROMPT[:, 9:], attention_mask=PADDED, position_ids=positions, **with_cache(cache))
    assert relative_error(output.logits[1, -1], expected) < 1e-6
    cache.crop(12)
    assert cache.get_seq_length() == 11
    cache.crop(3)
    assert cache.get_seq_length() == 3


def test_rows_of_the_cache() -> None:
    model = model_of("qwen3")
    cache = aura_cache(model, "8v4")
    logits_of(model, cache)
    keys = cache.layers[0].cache.decoded()[0]
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].cache.decoded()[0], keys.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(cache.layers[0].cache.decoded()[0], keys.flip(0))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes_used == 0


def test_padding_elsewhere_than_on_the_left_is_an_error() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"attention_mask: expected left padding, \[B, 10\], got bool of shape"):
        logits_of(model, aura_cache(model, "8v4"), PADDED.flip(-1))


@torch.no_grad()
def call(model: PreTrainedModel, cache: AuraCache | None = None, **options: Any) -> None:
    cache = aura_cache(model, "8v4") if cache is None else cache
    model(PROMPT, **with_cache(cache), **options)


def test_a_mask_of_ones_own_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: expected left padding, \[B, T\], got float32 of shape"):
        call(model_of("llama"), attention_mask=torch.zeros(2, 1, 11, 11))


def test_what_the_attention_does_not_do_is_an_error() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"softcap: expected None, got 50\.0"):
        call(model, softcap=50.0)
    with pytest.raises(ValueError, match="is_causal: expected True, got False"):
        call(model, is_causal=False)
    with pytest.raises(ValueError, match=r"position_bias: expected None, got float32 of shape \[1, 4, 11, 11\]"):
        call(model, position_bias=torch.zeros(1, 4, 11, 11))
    model.config.attention_dropout = 0.5
    model = type(model)(model.config).train()
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.5"):
        call(model)
    oss = model_of("gpt_oss")
    oss.set_attn_implementation("aura")
    with pytest.raises(ValueError, match="s_aux: expected None where the cache holds no codes"):
        call(oss, DynamicCache(config=oss.config))


def test_a_model_that_computes_with_cached_keys_is_an_error() -> None:
    """Such a model does not use our attention: eager's repeat_kv needs a tensor."""
    model = model_of("llama")
    cache = aura_cache(model, "8v4")
    keys, _ = cache.update(torch.randn(2, 2, 3, 64), torch.randn(2, 2, 3, 64), 0)
    with pytest.raises(AttributeError, match=r"expected keys and values to go straight to the attention, got \.shape"):
        keys.shape  # noqa: B018
    with pytest.raises(TypeError):
        torch.cat([keys, keys])


def test_a_model_that_has_nothing_to_hold_as_codes_is_an_error() -> None:
    config = Qwen3NextConfig(**COMMON, num_hidden_layers=1)
    with pytest.raises(ValueError, match="AuraCache: config: expected a model with layers of full attention"):
        AuraCache(config)
    small = LlamaConfig(**COMMON | {"head_dim": 48}, num_hidden_layers=1)
    with pytest.raises(ValueError, match="AuraCache: tail: expected at least 0, got -1"):
        AuraCache(small, tail=-1)
    with pytest.raises(ValueError, match=r"config: expected heads of 64, 80, .* or 512 values, got 48 in layer 0"):
        AuraCache(small)
    for config, got in (("Qwen/Qwen3.5-0.8B", "'Qwen/Qwen3.5-0.8B'"), (LlamaForCausalLM(small), "a LlamaForCausalLM")):
        with pytest.raises(TypeError, match=f"config: expected a model's configuration, as model.config, got {got}"):
            AuraCache(config)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])  # one with full attention, one with a sliding window
def test_a_used_cache_without_new_tokens_is_an_error(kind: str) -> None:
    model = model_of(kind)
    cache = aura_cache(model, "8v4")
    options = with_cache(cache) | {"do_sample": False, "pad_token_id": 0}
    model.generate(PROMPT, max_new_tokens=PROMPT.shape[1] + 1, **options)
    with pytest.raises(ValueError, match=f"expected new tokens, got none: it already holds {2 * PROMPT.shape[1]}"):
        model.generate(PROMPT, max_new_tokens=1, **options)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[B, 24\], with a column for each token that the"):
        model(PROMPT[:, :2], attention_mask=torch.tensor([[0, 1], [1, 1]]), **with_cache(cache))


@torch.no_grad()
def test_attention_without_the_cache_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns once, and not for layers that an AuraCache does not encode."""
    warn_of_tensors.cache_clear()
    model = model_of("llama")
    model.set_attn_implementation("aura")
    with pytest.warns(UserWarning, match=r"are not held as codes: pass (past_key_values|cache)=AuraCache"):
        model(PROMPT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(PROMPT)
        warn_of_tensors.cache_clear()
        monkeypatch.setattr(model.config, "attention_chunk_size", 4, raising=False)
        model(PROMPT)
        call(model_of("gpt_oss"), None)
    assert could_be_codes(torch.nn.Module(), None, None)  # a layer that does not say what kind it is


@torch.no_grad()
@pytest.mark.skipif(CACHE_NAMES == OLD_NAMES, reason="this transformers has no other name")
def test_the_old_name_of_the_cache() -> None:
    """transformers itself renames it, with a warning, until 5.40."""
    model, options = model_of("llama"), {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected, cache = (
        model.generate(PROMPT, **with_cache(aura_cache(model, "8v4t")), **options),
        aura_cache(model, "8v4t"),
    )
    with pytest.warns(FutureWarning, match=f"`{OLD_NAMES.model}` is deprecated .* Use `{CACHE_NAMES.model}` instead"):
        result = model.generate(PROMPT, **{OLD_NAMES.model: cache}, **options)
    assert torch.equal(result, expected) and cache.get_seq_length() == result.shape[1] - 1


@pytest.mark.skipif(CACHE_NAMES == OLD_NAMES, reason="the example has the newer name of the cache")
def test_the_example_runs() -> None:
    failed, attempted = doctest.testmod(torch_gdn.integrations.transformers.aura)
    assert failed == 0 and attempted > 0
