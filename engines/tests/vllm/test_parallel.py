"""Two processes on the CPU, by vLLM's own launcher; on mps a sentence that says why not."""

from __future__ import annotations

from typing import Any

import pytest

from engines.tests.vllm.conftest import GREEDY_TOKENS, EngineFailed, run_engine


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


def test_two_processes_on_mps_are_refused(reference: Any) -> None:
    path, texts, _, _ = reference("qwen3_next")
    options = {"dtype": "float32", "tensor_parallel_size": 2}
    with pytest.raises(EngineFailed, match=r"expected 1 process on mps, got 2: torch\.distributed has no collective"):
        run_engine("mps", {"model": str(path), "options": options, "rounds": [{"prompts": texts[:1], "tokens": 1}]})
