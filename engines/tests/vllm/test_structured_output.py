"""Tests structured output: the best token that the grammar allows, next to requests without a grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import CHUNKS, run_engine, scenario
from engines.tests.vllm.test_engine import NGRAM
from tests.helpers.small_models import with_tokenizer

END = 0  # eos_token_id
CHOICES = ["def alpha", "def beta", "class gamma", "del"]
PATTERN = "[0-9]{3}-[a-f]{4}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["class", "def"]}, "public": {"type": "boolean"}, "lines": {"enum": [1, 20, 300]}},
    "required": ["kind", "public", "lines"],
    "additionalProperties": False,
}


def allowed_by_choices(said: str) -> list[int]:
    return sorted({ord(each[len(said)]) if len(each) > len(said) else END for each in CHOICES if each.startswith(said)})


def allowed_by_pattern(said: str) -> list[int]:
    at = len(said)
    return list("0123456789" if at < 3 else "-" if at == 3 else "abcdef" if at < 8 else "") or [END]


def best_allowed(path: Path, text: list[int], allowed: Any) -> str:
    """Returns what transformers' generate() says if only such tokens are allowed."""
    import torch
    from transformers import AutoModelForCausalLM

    def tokens(_: int, ids: Any) -> list[int]:
        return [ord(x) if isinstance(x, str) else x for x in allowed(bytes(ids[len(text) :].tolist()).decode())]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([text])
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": END, "prefix_allowed_tokens_fn": tokens}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(text) :].tolist()
    assert out[-1] == END
    return bytes(out[:-1]).decode()


@pytest.fixture(scope="module")
def model(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(reference("qwen3_next")[0], tmp_path_factory.mktemp("structured"))


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": NGRAM}], ids=["token by token", "with drafts"])
def test_structured_output(device: str, drafts: dict[str, Any], model: Path, reference: Any) -> None:
    _, texts, tokens, _ = reference("qwen3_next")
    grammars: list[dict[str, Any]] = [{"choice": CHOICES}, {"regex": PATTERN}, {"json": SCHEMA}]
    sampling = [
        {"structured_outputs": grammars[i // 2 % 3], "ignore_eos": False, "max_tokens": 80} if i % 2 else {}
        for i in range(len(texts))
    ]
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}
    options = {**CHUNKS, **drafts, "skip_tokenizer_init": False, "structured_outputs_config": grammar}
    result = run_engine(device, scenario(model, texts, {"sampling": sampling}, **options))
    assert (result["metrics"].get("vllm:spec_decode_num_accepted_tokens", 0) > 0) == bool(drafts)
    answers = result["rounds"][0]["tokens"]
    assert answers[::2] == tokens[::2]
    said = []
    for answer in answers[1::2]:
        assert answer[-1] == END
        said.append(bytes(answer[:-1]).decode())
    constrained = texts[1::2]
    assert said[0::3] == [best_allowed(model, text, allowed_by_choices) for text in constrained[0::3]]
    assert said[1::3] == [best_allowed(model, text, allowed_by_pattern) for text in constrained[1::3]]
    assert all(each in CHOICES for each in said[0::3]) and all(re.fullmatch(PATTERN, each) for each in said[1::3])
    for each in map(json.loads, said[2::3]):
        assert sorted(each) == ["kind", "lines", "public"]
        assert each["kind"] in ("class", "def") and each["public"] in (True, False) and each["lines"] in (1, 20, 300)
