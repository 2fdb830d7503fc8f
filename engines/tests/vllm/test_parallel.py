"""Two processes by vLLM's own launcher, on the CPU and on mps."""

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


def test_several_machines_name_their_network(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts, _, _ = reference("qwen3_next")
    options = {"dtype": "float32", "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(EngineFailed, match="GLOO_SOCKET_IFNAME: expected the interface of the private network"):
        run_engine("mps", {"model": str(path), "options": options, "rounds": [{"prompts": texts[:1], "tokens": 1}]})
