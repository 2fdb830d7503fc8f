"""Two processes by vLLM's own launcher, on the CPU and on mps."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.tests.vllm.conftest import GREEDY_TOKENS, HERE, EngineFailed, environment, run_engine
from engines.tests.vllm.test_server import Server, free_port
from tests.helpers.small_models import with_tokenizer
from tests.helpers.streams import PATIENCE, begun


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


@pytest.mark.parametrize(("dies", "kind"), [(1, "--pipeline-parallel-size"), (0, "--tensor-parallel-size")])
def test_two_machines_of_which_one_dies(dies: int, kind: str, reference: Any, tmp_path: Path) -> None:
    """vLLM's launch over two machines gives one process's tokens. When all of one's processes die in the middle of a
    request, the other's end by themselves and say why.
    """
    path, texts, tokens, _ = reference("qwen3_5")
    model, master = with_tokenizer(path, tmp_path), str(free_port())
    machines = [kind, "2", "--nnodes", "2"]
    machines += ["--master-addr", "127.0.0.1", "--master-port", master, "--node-rank"]
    network = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "VLLM_HOST_IP": "127.0.0.1"}
    second = Server("mps", model, tmp_path / "1", *machines, "1", "--headless", **network)
    first = Server("mps", model, tmp_path / "0", *machines, "0", **network)
    try:
        first.wait()
        body = {"model": str(model), "temperature": 0, "ignore_eos": True}
        asked = {**body, "prompt": texts, "max_tokens": GREEDY_TOKENS, "return_token_ids": True}
        url, kind_of_body = f"http://127.0.0.1:{first.port}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(asked).encode(), kind_of_body)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
        stream = begun(first.port, "/v1/completions", {**body, "prompt": texts[0], "max_tokens": 400, "stream": True})
        end, other = (first, second)[dies], (second, first)[dies]
        family = other.family()
        os.killpg(end.process.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=90)
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            assert b'"error"' in stream.read()
    finally:
        for each in (first, second):
            each.stop(signal.SIGTERM)
    assert [choice["token_ids"] for choice in choices] == tokens
    assert left == []
    assert other.log.read_text().count(f"rank {dies} of the processes: the connection is lost") == 1


def machine(rank: int, model: Path, log: Path, master: int, *more: str, **environ: str) -> Server:
    """One of two, by vLLM's launch over several machines."""
    options = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(master)]
    network = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "VLLM_HOST_IP": "127.0.0.1"}
    return Server("mps", model, log, *options, *["--headless"] * rank, *more, **(network | environ))


FAULTS = {
    "version": "init_process_group: expected the same versions in all processes, got torch_gdn ",
    "model": "model: expected the same in all processes, got with_tokenizer (",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_two_machines_that_do_not_fit(fault: str, reference: Any, tmp_path: Path) -> None:
    """Each ends by itself, and says why."""
    import torch

    model, master = with_tokenizer(reference("qwen3_5")[0], tmp_path), free_port()
    other, environ = model, {}
    if fault == "version":
        own = "" if torch.backends.mps.is_available() else (HERE / "site" / "sitecustomize.py").read_text()
        fake = "from torch_gdn import distributed\ndistributed.__version__ = '0.0.9'\n"
        (tmp_path / "sitecustomize.py").write_text(own + fake)
        environ["PYTHONPATH"] = environment("mps", [tmp_path])["PYTHONPATH"]
    if fault == "model":
        (tmp_path / "other").mkdir()
        other = with_tokenizer(model, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    options = ["--pipeline-parallel-size", "2"]
    servers = [machine(0, model, tmp_path / "0", master, *options)]
    servers.append(machine(1, other, tmp_path / "1", master, *options, **environ))
    family: list[psutil.Process] = []
    try:
        for _ in range(300):
            family = list({each.pid: each for server in servers for each in [*family, *server.family()]}.values())
            if any(server.process.poll() is not None for server in servers):
                break
            time.sleep(1)
        _, left = psutil.wait_procs(family, timeout=90)
    finally:
        for each in servers:
            each.stop(signal.SIGKILL)
    assert left == []
    for each in servers:
        assert FAULTS[fault] in each.log.read_text(), each.log.read_text()[-3000:]


def test_several_machines_name_their_network(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts, _, _ = reference("qwen3_next")
    options = {"dtype": "float32", "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(EngineFailed, match="GLOO_SOCKET_IFNAME: expected the interface of the private network"):
        run_engine("mps", {"model": str(path), "options": options, "rounds": [{"prompts": texts[:1], "tokens": 1}]})
