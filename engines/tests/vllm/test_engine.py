"""vLLM's engine with the plugin: its tokens are those of transformers' generate(), one prompt after the other.

On mps torch_gdn's kernels run on the simulated device, under its watch: an access outside a pool ends the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import (
    CHUNKS,
    GREEDY_TOKENS,
    EngineFailed,
    assert_tokens_agree,
    run_engine,
    run_engines,
    scenario,
)
from tests.helpers.small_models import TEXT, TRAINED, generated

ALIGNED = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def holds_nothing(result: dict[str, Any]) -> bool:
    return bool(result["pool"]["free"] == result["pool"]["all"] - 1)  # block 0 is the null block


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen3"])
def test_tokens_equal_generate(device: str, family: str, reference: Any) -> None:
    count, longest = (32, 300) if family == "qwen3_next" else (12, 130)
    path, texts, tokens, _ = reference(family, count, longest)
    result = run_engine(device, scenario(path, texts, **CHUNKS))
    assert result["rounds"][0]["tokens"] == tokens
    assert holds_nothing(result)
    assert result["compiled late"] == []
    if device == "mps":
        wanted = {"qwen3": {"paged_attention", "reshape_and_cache", "rms_norm_float"}}.get(
            family, {"fused_recurrent", "causal_conv1d", "rms_norm_gated", "rms_norm_float", "paged_attention"}
        )
        wanted |= {"gdn_decode"} if family.startswith("qwen3_") else set()
        assert all(any(name.startswith(each) for name in result["kernels"]) for each in wanted), result["kernels"]


def test_bfloat16_differs_only_where_two_tokens_are_close(device: str, reference: Any) -> None:
    path, texts, tokens, margins = reference("qwen3_next", 12, 130, "bfloat16")
    result = run_engine(device, scenario(path, texts, **CHUNKS, dtype="bfloat16"))
    assert_tokens_agree(result["rounds"][0]["tokens"], tokens, margins, 0.15)


def test_pages_of_codes(device: str, reference: Any) -> None:
    """Without a tail, tokens differ only where two are close, and a pool of the same size holds more blocks. The next
    engine of the process, which does not ask for codes, has none."""
    path, texts, tokens, margins = reference("qwen3")
    options = {**CHUNKS, "block_size": 32}
    codes_alone = {"aura": "8v4t", "aura_tail": 0, "aura_sinks": 0}
    scenarios = [scenario(path, texts, **options, **each) for each in ({"additional_config": codes_alone}, {})]
    result, later = run_engines(device, scenarios)
    assert_tokens_agree(result["rounds"][0]["tokens"], tokens, margins, 0.5)
    assert holds_nothing(result)
    assert result["compiled late"] == []
    if device == "mps":
        assert any(name.startswith("aura_paged_attention") for name in result["kernels"])
    assert later["rounds"][0]["tokens"] == tokens
    assert result["pool"]["all"] > 2.5 * later["pool"]["all"]


def test_exact_rows_hide_the_error_of_codes(device: str, reference: Any) -> None:
    """Codes of 2 bits change tokens. A tail as long as the prompts leaves none of them to read, whatever the scheduler
    does: parts of prompts, drafts that are rejected, aborted requests, and slots that other requests had before.
    """
    path, texts, tokens, margins = reference("qwen3")
    rounds = [{"abort": [0, 3], "abort_after": 3}, {"accept": [0, 3, 1, 2], "continuations": tokens}, {}]
    options = {**CHUNKS, "block_size": 32, "max_num_seqs": 4, "speculative_config": NGRAM}
    long, short = {"aura": "2v2", "aura_tail": 144}, {"aura": "2v2", "aura_tail": 0, "aura_sinks": 1}
    result, worse = run_engines(
        device,
        [
            scenario(path, texts, *rounds, **options, additional_config=long),
            scenario(path, texts, **options, additional_config=short),
        ],
    )
    assert [each["tokens"] for each in result["rounds"][1:]] == [tokens, tokens]
    assert holds_nothing(result)
    assert result["compiled late"] == []
    with pytest.raises(AssertionError):
        assert_tokens_agree(worse["rounds"][0]["tokens"], tokens, margins, 0.5)


def test_rings_wrap_around_and_prefixes_are_read_from_codes(device: str, reference: Any) -> None:
    """The tail is a ninth of the longest prompt, and half of a batch has none. The second round finds its prompts."""
    path, texts, tokens, margins = reference("qwen3")
    options = {**CHUNKS, "block_size": 32, "max_num_seqs": 4, "enable_prefix_caching": True}
    few = {"aura": "8v8", "aura_tail": 14, "aura_requests": 2}
    result = run_engine(device, scenario(path, texts, {}, {}, **options, additional_config=few))
    assert max(result["rounds"][1]["cached"]) >= 64
    for each in result["rounds"]:
        assert_tokens_agree(each["tokens"], tokens, margins, 0.05)


def test_exact_rows_of_windows_and_of_preempted_requests(device: str, reference: Any) -> None:
    """Half of the layers see 40 tokens and lose their first blocks. The pool holds two of the four requests to the end,
    and the others start again: their rows are then written anew."""
    path, texts, tokens, _ = reference("exaone4")
    options = {**CHUNKS, "block_size": 32, "max_num_seqs": 4, "max_model_len": 160, "num_gpu_blocks_override": 18}
    coded = {"aura": "2v2", "aura_tail": 144}
    result = run_engine(device, scenario(path, texts, **options, additional_config=coded))
    assert result["rounds"][0]["tokens"] == tokens
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert holds_nothing(result)
    assert result["compiled late"] == []


def test_exact_rows_with_multi_token_prediction(device: str, reference: Any) -> None:
    """The predictor's own layer has codes and exact rows too: its drafts are as often right as without codes."""
    path, texts, tokens, _ = reference("qwen3_5_mtp")
    options = {**CHUNKS, "max_num_seqs": 4, "speculative_config": MTP}
    coded = {**options, "additional_config": {"aura": "2v2", "aura_tail": 144}}
    results = run_engines(device, [scenario(path, texts, **each) for each in (coded, options)])
    assert [each["rounds"][0]["tokens"] for each in results] == [tokens, tokens]
    drafts = [{name: x for name, x in each["metrics"].items() if "spec_decode" in name} for each in results]
    assert drafts[0] == drafts[1] and drafts[0]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert holds_nothing(results[0])
    assert results[0]["compiled late"] == []


def test_means_of_keys(device: str, reference: Any) -> None:
    """Keys that have channels with large means need these in 3 bits. A tail of 127 tokens is too short for means. The
    second round finds blocks of the first one, and their means."""
    path, texts, tokens, margins = reference("qwen3_biased", 8, 400)
    options = {"max_num_batched_tokens": 96, "block_size": 128, "enable_prefix_caching": True}
    scenarios = [
        scenario(path, texts, *[{}] * rounds, **options, additional_config={"aura": "3v8", "aura_tail": tail})
        for tail, rounds in ((128, 2), (127, 1))
    ]
    result, without = run_engines(device, scenarios)
    assert max(result["rounds"][1]["cached"]) >= 256
    for each in result["rounds"]:
        assert_tokens_agree(each["tokens"], tokens, margins, 0.15)
    assert holds_nothing(result)
    assert result["compiled late"] == []
    with pytest.raises(AssertionError):
        assert_tokens_agree(without["rounds"][0]["tokens"], tokens, margins, 0.15)


def test_layers_that_share_keys(device: str, reference: Any) -> None:
    """The last two of Gemma3n's layers have no keys. They read the codes of two other layers, which
    were rotated with those layers' signs."""
    path, texts, tokens, margins = reference("gemma3n", 4, 300)
    options = {"max_num_batched_tokens": 96, "block_size": 128, "additional_config": {"aura": "8v8"}}
    result = run_engine(device, scenario(path, texts, **options))
    assert_tokens_agree(result["rounds"][0]["tokens"], tokens, margins, 0.05)
    assert result["compiled late"] == []


def test_the_same_fails_without_the_plugin(reference: Any, tmp_path: Path) -> None:
    """Each process declares torchvision's operators by itself, because the plugin does not."""
    declare = "from torch_gdn_engines import torchvision_operators\ntorchvision_operators.declare()\n"
    (tmp_path / "sitecustomize.py").write_text(declare)
    path, texts, _, _ = reference("qwen3_next")
    with pytest.raises(EngineFailed, match=r"No Qwen3Next layer found in the model\.layers"):
        run_engine("off", scenario(path, texts[:2], **CHUNKS), [tmp_path])


def test_a_conversation_reads_its_past_from_the_cache(device: str) -> None:
    """Five turns; each prompt is all that was said before and something new."""
    turns: list[list[int]] = []
    replies: list[list[int]] = []
    said: list[int] = []
    for turn in range(5):
        said = said + list(TEXT[turn * 211 : turn * 211 + 250])
        tokens, _ = generated(TRAINED, [said], GREEDY_TOKENS)
        turns.append(said)
        replies.append(tokens[0])
        said = said + tokens[0]
    rounds = [{"prompts": [turn]} for turn in turns]
    options = {"max_model_len": 2048, "max_num_batched_tokens": 512, **ALIGNED}
    result = run_engine(device, scenario(TRAINED, [], *rounds, **options))
    assert [each["tokens"][0] for each in result["rounds"]] == replies
    cached = [each["cached"][0] for each in result["rounds"]]
    assert cached[0] == 0 and cached == sorted(cached) and cached[-1] >= 512, cached
    assert holds_nothing(result)


@pytest.mark.parametrize("caching", [{}, ALIGNED], ids=["no cache", "aligned cache"])
def test_drafts_accepted_and_refused(device: str, caching: dict[str, Any], reference: Any) -> None:
    """In one step, one request's drafts are accepted and another's refused, from none to all of them."""
    path, texts, tokens, _ = reference("qwen3_next")
    drafted = {"accept": [0, 3, 1, 2], "continuations": tokens}
    options = {**CHUNKS, **caching, "speculative_config": NGRAM}
    result = run_engine(device, scenario(path, texts, drafted, drafted, **options))
    assert [each["tokens"] for each in result["rounds"]] == [tokens, tokens]
    proposed = result["metrics"]["vllm:spec_decode_num_draft_tokens"]
    accepted = result["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert 0.2 * proposed < accepted < 0.8 * proposed
    assert holds_nothing(result)
    assert result["compiled late"] == []


@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3_next_mtp", CHUNKS),
        # Parts end at blocks, whose size depends on the device, and vLLM's drafts depend on where parts end.
        ("qwen3_5_mtp", {**ALIGNED, "max_num_batched_tokens": 1024}),
    ],
    ids=["qwen3_next", "qwen3_5, aligned cache"],
)
def test_multi_token_prediction(family: str, options: dict[str, Any], reference: Any) -> None:
    """Drafts of the model's own layer are as often right on mps as on the CPU, where vLLM's kernels prepare them.
    A seed gives the same tokens again."""
    path, texts, tokens, _ = reference(family)
    sampled = {"prompts": texts[:6], "sampling": {"temperature": 1.0, "seed": 7}}
    given = scenario(path, texts, {}, sampled, sampled, **options, speculative_config=MTP)
    counts = []
    for device in ("cpu", "mps"):
        result = run_engine(device, given)
        greedy, first, second = result["rounds"]
        assert greedy["tokens"] == tokens
        assert first["tokens"] == second["tokens"]
        assert holds_nothing(result)
        assert result["compiled late"] == []
        proposed = greedy["metrics"]["vllm:spec_decode_num_draft_tokens"]
        accepted = greedy["metrics"]["vllm:spec_decode_num_accepted_tokens"]
        assert 0.05 * proposed < accepted < 0.9 * proposed
        counts.append((proposed, accepted))
    assert counts[0] == counts[1]


def test_drafts_across_the_ends_of_blocks(device: str) -> None:
    """Aligned caching copies states when accepted tokens pass a block's end: more than a block of them is generated."""
    text = list(TEXT[:200])
    tokens, _ = generated(TRAINED, [text], 400)
    turn = {"tokens": 400, "accept": [3, 1, 2, 0, 2], "continuations": tokens}
    again = {"prompts": [text + tokens[0][:380]], "tokens": 20, "accept": [2], "continuations": [tokens[0][380:]]}
    options = {"max_num_batched_tokens": 512, **ALIGNED, "speculative_config": NGRAM}
    result = run_engine(device, scenario(TRAINED, [text], turn, again, again, **options))
    assert [each["tokens"][0] for each in result["rounds"]] == [tokens[0], tokens[0][380:], tokens[0][380:]]
    assert result["rounds"][2]["cached"][0] >= 256
    assert holds_nothing(result)


def test_a_pool_that_is_too_small_preempts(device: str) -> None:
    """Six requests fit into it as long as each has one block of keys and values, and all want a second."""
    texts = [list(TEXT[first : first + 270]) for first in range(0, 600, 100)]
    tokens, _ = generated(TRAINED, texts, 40)
    options = {"max_num_batched_tokens": 512, "block_size": 32, "num_gpu_blocks_override": 26}
    result = run_engine(device, scenario(TRAINED, texts, {"tokens": 40}, **options))
    assert result["rounds"][0]["tokens"] == tokens
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert holds_nothing(result)


def test_aborted_requests_and_sleep_leave_nothing(device: str, reference: Any) -> None:
    path, texts, tokens, _ = reference("qwen3_next")
    aborted = list(range(0, len(texts), 3))
    rounds = [{"abort": aborted, "abort_after": 9}, {"sleep": True}]
    result = run_engine(device, scenario(path, texts, *rounds, **CHUNKS))
    first, second = (each["tokens"] for each in result["rounds"])
    assert [first[i] for i in range(len(texts)) if i not in aborted] == [
        tokens[i] for i in range(len(texts)) if i not in aborted
    ]
    assert any(len(first[i]) < GREEDY_TOKENS for i in aborted)
    assert second == tokens
    assert holds_nothing(result)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(device: str) -> None:
    """Alone, the prompt is split into three parts, and together with a prompt of 61 tokens into four. Each part except
    the last samples a token that is thrown away."""
    prompt, other = list(TEXT[97:227]), list(TEXT[:61])
    sampling = {"temperature": 1.0, "seed": 7}
    rounds = [{"prompts": prompts, "sampling": sampling} for prompts in ([prompt], [other, prompt])]
    result = run_engine(device, scenario(TRAINED, [], *rounds, **CHUNKS, speculative_config=NGRAM))
    alone, batch = (each["tokens"] for each in result["rounds"])
    assert alone[0] == batch[1]
    assert result["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
