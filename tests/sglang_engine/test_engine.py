"""SGLang's engine with the plugin: its tokens are those of transformers' generate(), one prompt after the other.

torch_gdn's kernels run on the simulated device, under its watch: an access outside a pool ends the engine. An engine
takes half a minute to start, so each goes through several rounds.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.sglang_engine.conftest import GREEDY_TOKENS, run_engine
from tests.vllm_engine.models import TEXT, generated

CHUNKS = {"chunked_prefill_size": 64}  # prompts come in parts
LAUNCHED = ("fused_recurrent", "causal_conv1d", "rms_norm_gated", "rms_norm_float", "paged_attention", "chunk_fwd")


def holds_nothing(result: dict[str, Any]) -> bool:
    return all(free == size for free, size in result["pools"].values()) and result["processes"] == []


def next_turns(texts: list[Any], replies: list[Any]) -> list[Any]:
    return [text + reply + list(TEXT[i : i + 5]) for i, (text, reply) in enumerate(zip(texts, replies, strict=True))]


@pytest.mark.parametrize("family", ["qwen3_next_moe", "qwen3_5_moe"])
def test_tokens_equal_generate(family: str, reference: Any) -> None:
    """A conversation's next turn continues from the cached state."""
    path, texts, tokens, _ = reference(family)
    turns = next_turns(texts, tokens)
    replies, _ = generated(path, turns, GREEDY_TOKENS)
    rounds = [{"prompts": prompts, "tokens": GREEDY_TOKENS} for prompts in (texts, turns)]
    result = run_engine({"model": str(path), "options": {"dtype": "float32", **CHUNKS}, "rounds": rounds})
    assert [each["tokens"] for each in result["rounds"]] == [tokens, replies]
    assert sum(result["rounds"][1]["cached"]) > 300
    assert holds_nothing(result)
    launched = [*LAUNCHED, "moe_router", "moe_gate_up", "moe_down"]
    assert [name for name in launched if not any(each.startswith(name) for each in result["launched"])] == []
