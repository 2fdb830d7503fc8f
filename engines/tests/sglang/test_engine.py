"""Tests that SGLang's engine with the plugin gives the tokens of transformers' generate(), one prompt after the other.

torch_gdn's kernels run on the simulated device, under its watch: an access outside a pool ends the engine. An engine
takes half a minute to start, so each runs several rounds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.tests.sglang.conftest import GREEDY_TOKENS, HERE, as_released, environment, run_engine
from tests.helpers.packed_models import Format
from tests.helpers.small_models import TEXT, generated, prompts
from tests.helpers.wide import assert_loading_takes_little

SEEDED = {"temperature": 1.0, "sampling_seed": 7}
CHUNKS = {"chunked_prefill_size": 64}  # prompts are prefilled in parts
KERNELS = ["fused_recurrent", "fused_chunk_gated", "causal_conv1d", "rms_norm_gated", "rms_norm_float"]


def holds_nothing(result: dict[str, Any]) -> bool:
    return all(free == size for free, size in result["pools"].values()) and result["processes"] == []


def next_turns(texts: list[Any], replies: list[Any]) -> list[Any]:
    return [text + reply + list(TEXT[i : i + 5]) for i, (text, reply) in enumerate(zip(texts, replies, strict=True))]


@pytest.mark.parametrize("family", ["qwen3_next_moe", "qwen3_5_moe"])
def test_tokens_equal_generate(family: str, reference: Any, tmp_path: Path) -> None:
    """A conversation's next turn continues from the cached state. Qwen3.5 is named as its released models are."""
    path, texts, tokens = reference(family)
    turns = next_turns(texts, tokens)
    replies, _ = generated(path, turns, GREEDY_TOKENS)
    rounds = [{"prompts": prompts, "tokens": GREEDY_TOKENS} for prompts in (texts, turns)]
    model = as_released(path, tmp_path) if family == "qwen3_5_moe" else path
    result = run_engine({"model": str(model), "options": {"dtype": "float32", **CHUNKS}, "rounds": rounds})
    assert [each["tokens"] for each in result["rounds"]] == [tokens, replies]
    assert sum(result["rounds"][1]["cached"]) > 300
    assert holds_nothing(result)
    assert result["compiled late"] == []
    launched = [*KERNELS, "paged_attention", "moe_router", "moe_gate_up", "moe_down"]
    assert [name for name in launched if not any(each.startswith(name) for each in result["launched"])] == []


def test_features_of_one_engine(packed: Any) -> None:
    """Requests are aborted or streamed, or have logprobs, grammars and seeds, in a batch with plain ones. Weights are
    packed.
    """
    path, numbers = packed("qwen3_5", Format("awq"))
    texts = prompts(12, 130)
    tokens, _ = generated(numbers, texts, GREEDY_TOKENS)
    greedy = {"prompts": texts, "tokens": GREEDY_TOKENS}
    grammar = [{"regex": "(red|green|blue){8}"} if i % 2 else {} for i in range(len(texts))]
    rounds = [
        {**greedy, "abort": [1, 4, 7]},
        {**greedy, "stream": True},
        {**greedy, "logprobs": True, "flush": True},
        {**greedy, "sampling": grammar},
        {**greedy, "sampling": [SEEDED, *[{}] * (len(texts) - 2), SEEDED]},
        {**greedy, "prompts": texts[-1:], "sampling": SEEDED},
        {**greedy, "prompts": texts[-1:], "sampling": {**SEEDED, "sampling_seed": 8}},
    ]
    result = run_engine({"model": str(path), "options": {"dtype": "float32", **CHUNKS}, "rounds": rounds})
    aborted, streamed, scored, constrained, mixed, seeded, other = result["rounds"]
    for i, answer in enumerate(aborted["tokens"]):
        assert answer == tokens[i][: len(answer)]
        assert (len(answer) < GREEDY_TOKENS) == (i in (1, 4, 7))
    assert streamed["tokens"] == tokens and min(streamed["parts"]) > 2
    assert scored["tokens"] == tokens
    for got, want in zip(scored["logprobs"], logprobs(numbers, texts, tokens), strict=True):
        torch.testing.assert_close(torch.tensor(got), want, atol=2e-4, rtol=0)
    for i, answer in enumerate(constrained["tokens"]):
        assert re.match("^(red|green|blue)+", bytes(answer).decode()) if i % 2 else answer == tokens[i]
    assert mixed["tokens"][1:-1] == tokens[1:-1]
    assert mixed["tokens"][-1] == seeded["tokens"][0] != tokens[-1]
    assert other["tokens"] != seeded["tokens"]
    assert holds_nothing(result)
    assert result["compiled late"] == []
    assert any(name.startswith("quantized_linear") for name in result["launched"])


def logprobs(path: Any, texts: list[Any], tokens: list[Any], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns transformers' log probabilities of the tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    values = []
    for text, answer in zip(texts, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text + answer])).logits[0, len(text) - 1 : -1]
        values.append(logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].float())
    return values


def test_states_kept_every_64_tokens(packed: Any) -> None:
    """With SGLang's extra_buffer, states are kept within prompts and during decoding, and prefixes share them. The
    model is named like Qwen3.5's released ones, and is packed.
    """
    path, numbers = packed("qwen3_5", Format("compressed-tensors", is_ordered=True, wrapped=True))
    texts, long = prompts(12, 130), [list(TEXT[first : first + 200]) for first in (0, 300)]
    tokens, _ = generated(numbers, texts, GREEDY_TOKENS)
    replies, _ = generated(numbers, long, 80)
    turns = next_turns(long, replies)
    answers, _ = generated(numbers, turns, GREEDY_TOKENS)
    rounds = [
        {"prompts": texts, "tokens": GREEDY_TOKENS},
        {"prompts": long, "tokens": 80},
        {"prompts": turns, "tokens": GREEDY_TOKENS},
    ]
    options = {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64, "chunked_prefill_size": 128}
    result = run_engine({"model": str(path), "options": {"dtype": "float32", **options}, "rounds": rounds})
    assert [each["tokens"] for each in result["rounds"]] == [tokens, replies, answers]
    assert min(result["rounds"][2]["cached"]) >= 256  # more than the prompt's 200
    assert any(name.startswith("batch_copy") for name in result["launched"])
    assert holds_nothing(result)
    assert result["compiled late"] == []


def test_small_pools_retract_requests_and_evict_states(packed: Any) -> None:
    """Every few steps SGLang gives up a request's pages and state, as when they run out, and computes them again. The
    experts and the other layers are packed.
    """
    path, numbers = packed("qwen3_5_moe", Format("gptq", is_symmetric=True, wrapped=True))
    texts = [list(TEXT[first : first + 90]) for first in range(0, 600, 100)]
    tokens, _ = generated(numbers, texts, 40)
    turns = next_turns(texts, tokens)
    answers, _ = generated(numbers, turns, GREEDY_TOKENS)
    pools = {"max_total_tokens": 1024, "max_mamba_cache_size": 14, "max_running_requests": 6}
    rounds = [{"prompts": texts, "tokens": 40}, {"prompts": turns, "tokens": GREEDY_TOKENS}]
    result = run_engine(
        {"model": str(path), "options": {"dtype": "float32", **CHUNKS, **pools}, "rounds": rounds},
        SGLANG_TEST_RETRACT="1",
        SGLANG_TEST_RETRACT_INTERVAL="8",
    )
    assert [each["tokens"] for each in result["rounds"]] == [tokens, answers]
    assert result["retracted"] > 0
    assert 0 < sum(each > 0 for each in result["rounds"][1]["cached"]) < len(turns)
    assert holds_nothing(result)
    assert result["compiled late"] == []


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_wide"])
def test_fp8(family: str, packed: Any) -> None:
    """Qwen's files, of a dense model and of a mixture, whose experts, shared expert and other layers are FP8 in blocks.
    SGLang refuses experts of other widths than multiples of 128.
    """
    path, numbers = packed(family, Format("fp8", wrapped=True))
    texts = prompts(12, 130)
    tokens, _ = generated(numbers, texts, GREEDY_TOKENS)
    rounds = [{"prompts": texts, "tokens": GREEDY_TOKENS}]
    result = run_engine({"model": str(path), "options": {"dtype": "float32", **CHUNKS}, "rounds": rounds})
    assert [each["tokens"] for each in result["rounds"]] == [tokens]
    launched = ["quantized_linear", *(["moe_gate_up", "moe_down"] if "moe" in family else [])]
    assert [name for name in launched if not any(each.startswith(name) for each in result["launched"])] == []
    assert holds_nothing(result)
    assert result["compiled late"] == []


def test_fused_experts_are_loaded_as_they_are(tmp_path: Path) -> None:
    """The file has a layer's experts in one tensor."""
    assert_loading_takes_little(HERE / "loading.py", "fp8, fused", tmp_path, environment())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next_moe", "qwen3_5_moe"])
def test_bfloat16_is_nearly_as_exact_as_transformers(family: str, reference: Any) -> None:
    """The log probabilities of SGLang's tokens are compared with those in float32."""
    path, texts, _ = reference(family)
    rounds = [{"prompts": texts, "tokens": GREEDY_TOKENS, "logprobs": True}]
    result = run_engine({"model": str(path), "options": {"dtype": "bfloat16", **CHUNKS}, "rounds": rounds})
    answer = result["rounds"][0]
    exact, theirs = (
        torch.cat(logprobs(path, texts, answer["tokens"], dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    ours = torch.tensor([value for values in answer["logprobs"] for value in values])
    assert (ours - exact).abs().median() <= 2 * (theirs - exact).abs().median()  # a router's choice may differ
    assert holds_nothing(result)
    assert result["compiled late"] == []
