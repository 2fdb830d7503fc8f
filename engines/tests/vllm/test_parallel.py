"""Two processes by vLLM's own launcher, on the CPU and on mps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import GREEDY_TOKENS, EngineFailed, run_at_start, run_engine


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
    options = {"dtype": "float32", "max_num_batched_tokens": 64, kind: 2, "enforce_eager": is_eager}
    options["distributed_executor_backend"] = "mp"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core each: by itself vLLM wants a NUMA node each
    result = run_engine(
        "cpu", {"model": str(path), "options": options, "rounds": [{"prompts": texts, "tokens": GREEDY_TOKENS}]}
    )
    assert result["rounds"][0]["tokens"] == tokens


@pytest.mark.parametrize(
    "kind, family",
    [("tensor_parallel_size", "qwen3_next"), ("pipeline_parallel_size", "qwen3_5")],
)
def test_two_processes_on_mps(kind: str, family: str, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round begins with states that the first one left, at the ends of blocks."""
    path, texts, tokens, _ = reference(family)
    options = {"dtype": "float32", "max_num_batched_tokens": 64, kind: 2, "distributed_executor_backend": "mp"}
    options["enable_prefix_caching"] = True
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    round_ = {"prompts": texts, "tokens": GREEDY_TOKENS}
    first, second = run_engine("mps", {"model": str(path), "options": options, "rounds": [round_] * 2})["rounds"]
    assert first["tokens"] == second["tokens"] == tokens
    assert max(second["cached"]) > 0


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
    options = {"dtype": "float32", kind: 2, "distributed_executor_backend": "mp"}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run_at_start(COUNT, tmp_path)
    round_ = {"prompts": texts[2:3], "tokens": GREEDY_TOKENS}
    run_engine("mps", {"model": str(path), "options": options, "rounds": [round_]}, [tmp_path])
    counted = [sum(map(int, file.read_text().split())) for file in tmp_path.glob("bytes of *")]
    assert sorted(filter(None, counted)) == [4 * each for each in per_process]


def test_several_machines_name_their_network(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts, _, _ = reference("qwen3_next")
    options = {"dtype": "float32", "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(EngineFailed, match="GLOO_SOCKET_IFNAME: expected the interface of the private network"):
        run_engine("mps", {"model": str(path), "options": options, "rounds": [{"prompts": texts[:1], "tokens": 1}]})
