"""Two processes by vLLM's own launcher, on the CPU and on mps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import (
    CHUNKS,
    GREEDY_TOKENS,
    assert_tokens_agree,
    run_at_start,
    run_engine,
    scenario,
)
from tests.helpers.packed_models import PLAIN, Format, packed_model
from tests.helpers.small_models import generated


@pytest.mark.parametrize(
    "kind, family, is_eager",
    [
        ("tensor_parallel_size", "qwen3_next", True),
        # vLLM wants attention in each part of the layers; its CPU worker makes what they exchange when it compiles.
        ("pipeline_parallel_size", "qwen3_5", False),
    ],
)
def test_two_processes(kind: str, family: str, is_eager: bool, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts, tokens, _ = reference(family)
    options = {**CHUNKS, kind: 2, "enforce_eager": is_eager, "distributed_executor_backend": "mp"}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core each: by itself vLLM wants a NUMA node each
    result = run_engine("cpu", scenario(path, texts, **options))
    assert result["rounds"][0]["tokens"] == tokens


FAMILIES = ("qwen3_next_moe", "qwen3_5", "qwen3_5_moe")
CELLS = [
    ("tensor_parallel_size", "qwen3_next", ""),  # without experts
    ("tensor_parallel_size", "qwen3_next_mtp", "drafts"),  # with experts
    ("tensor_parallel_size", "qwen3_5_mtp", "drafts"),
    ("tensor_parallel_size", "olmo_hybrid", ""),  # AURA has no codebook for its heads of 32
    ("pipeline_parallel_size", "olmo_hybrid", "packed"),
    *itertools.product(["tensor_parallel_size"], FAMILIES, ["", "aura"]),
    *itertools.product(["pipeline_parallel_size"], FAMILIES, ["", "packed", "packed, aura"]),
]
OPTIONS = {
    "drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "aura": {"additional_config": {"aura": "8v8", "aura_tail": 14}},
}

PACKED = Format("compressed-tensors", plain=rf"{PLAIN}|\.[ab]_proj$")  # OLMo-Hybrid's decays have four rows


@pytest.mark.sweep(len(CELLS))
@pytest.mark.parametrize("kind, family, features", CELLS)
def test_two_processes_on_mps(kind: str, family: str, features: str, reference: Any, tmp_path: Path) -> None:
    assert_two_are_one(kind, family, features, reference, tmp_path)


def assert_two_are_one(
    kind: str, family: str, features: str, reference: Any, folder: Path, first: Sequence[Path] = ()
) -> str:
    """Prompts come in parts. The second round begins with states that the first one left, at the ends of blocks.
    Returns vLLM's version.
    """
    has_codes, has_long_blocks = "aura" in features, "aura" in features or family == "qwen3_next"
    path, texts, tokens, margins = reference(family, 6, 600 if has_long_blocks else 130)
    if "packed" in features:
        path, numbers = packed_model(path, PACKED, folder / "packed")
        tokens, margins = generated(numbers, texts, GREEDY_TOKENS)
    options: dict[str, Any] = {**CHUNKS, "enable_prefix_caching": True, "max_num_seqs": 4}
    is_coded_pipeline = has_codes and kind == "pipeline_parallel_size"
    if is_coded_pipeline:  # what a prompt's part reads as codes depends on where parts end, and that on other requests
        options["max_num_seqs"] = 1
    for name in OPTIONS.keys() & features.split(", "):
        options |= OPTIONS[name]
    one = scenario(path, texts, {}, {}, **options)
    two = scenario(path, texts, {}, {}, **options, **{kind: 2}, distributed_executor_backend="mp")
    result = run_engine("mps", two, first, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert max(result["rounds"][1]["cached"]) > 0
    if is_coded_pipeline:
        alone = run_engine("mps", one, first)
        assert [each["tokens"] for each in result["rounds"]] == [each["tokens"] for each in alone["rounds"]]
    else:
        for each in result["rounds"]:
            assert_tokens_agree(each["tokens"], tokens, margins, 0.05 if has_codes else 0)
    assert ("drafts" in features) == (result["metrics"].get("vllm:spec_decode_num_accepted_tokens", 0) > 0)
    return str(result["version"])


COUNT = """
import os
from torch_gdn.distributed import Copies
finish = Copies.finish_reading
def counted(self):
    with open(f"{os.path.dirname(__file__)}/bytes of {os.getpid()}", "a") as file:
        print(sum(staged.on_cpu.nbytes for staged in self.read), file=file)
    finish(self)
Copies.finish_reading = counted
"""


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_bytes_that_cross(kind: str, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the table in docs/several-macs.md."""
    path, texts, _, _ = reference("qwen3_5")
    config = json.loads((path / "config.json").read_text())
    tokens, numbers = len(texts[2]) + GREEDY_TOKENS - 1, 2 * config["hidden_size"]
    per_process = [numbers * tokens]  # the second one sends nothing
    if kind == "tensor_parallel_size":
        sums = numbers * config["num_hidden_layers"] + config["hidden_size"]
        per_process = [sums * tokens + config["vocab_size"] // 2 * GREEDY_TOKENS] * 2
    options = {kind: 2, "distributed_executor_backend": "mp"}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run_at_start(COUNT, tmp_path)
    run_engine("mps", scenario(path, texts[2:3], **options), [tmp_path])
    counted = [sum(map(int, file.read_text().split())) for file in tmp_path.glob("bytes of *")]
    assert sorted(filter(None, counted)) == [4 * each for each in per_process]
