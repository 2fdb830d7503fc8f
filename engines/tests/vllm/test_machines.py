"""Two machines by vLLM's launch: one process's tokens, and what each says when the other fails. All is one machine, on
its loopback address or with a cable between two networks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.tests.vllm.conftest import GREEDY_TOKENS, environment, run_at_start
from engines.tests.vllm.test_server import Server
from tests.helpers import cable
from tests.helpers.small_models import with_tokenizer
from tests.helpers.streams import PATIENCE, begun, free_port

PIPELINE, TENSORS = ("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "2")
LOOPBACK = ("lo0" if sys.platform == "darwin" else "lo", ("127.0.0.1", "127.0.0.1"))


def machine(
    rank: int, model: Path, log: Path, master: int, *more: str, network: Any = LOOPBACK, **environ: str
) -> Server:
    interface, addresses = network
    options = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", addresses[0], "--master-port", str(master)]
    own = {"GLOO_SOCKET_IFNAME": interface, "VLLM_HOST_IP": addresses[rank]}
    return Server("mps", model, log, *options, *["--headless"] * rank, *more, **(own | environ))


def answers(server: Server, model: Path, texts: list[Any]) -> list[Any]:
    """Returns the tokens of greedy completions."""
    body = {"model": str(model), "temperature": 0, "ignore_eos": True, "prompt": texts, "max_tokens": GREEDY_TOKENS}
    url, kind = f"http://127.0.0.1:{server.port}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body | {"return_token_ids": True}).encode(), kind)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def long_answer(server: Server, model: Path, text: Any) -> http.client.HTTPResponse:
    body = {"model": str(model), "temperature": 0, "ignore_eos": True, "prompt": text, "max_tokens": 400}
    return begun(server.port, "/v1/completions", {**body, "stream": True})


def assert_fails(stream: http.client.HTTPResponse) -> None:
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        assert b'"error"' in stream.read()


def left_when_all_end(servers: Sequence[Server], seconds: float) -> list[psutil.Process]:
    """Waits until a server ends by itself, and for all processes of all servers. Returns those that are left."""
    family: dict[int, psutil.Process] = {}
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and all(each.process.poll() is None for each in servers):
        for each in servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= {process.pid: process for process in each.family()}
        time.sleep(0.5)
    return psutil.wait_procs(family.values(), timeout=seconds)[1]


@contextlib.contextmanager
def stopped_at_the_end(servers: Sequence[Server]) -> Any:
    try:
        yield
    finally:
        for each in servers:
            with contextlib.suppress(ProcessLookupError):  # its workers are in its group, and may outlive it
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


@pytest.mark.parametrize(("dies", "kind"), [(1, PIPELINE), (0, TENSORS)])
def test_one_dies(dies: int, kind: tuple[str, str], reference: Any, tmp_path: Path) -> None:
    """When all of one's processes die in the middle of a request, the other's end by themselves and say why. A pair
    that is started again, with the same port, serves again.
    """
    path, texts, tokens, _ = reference("qwen3_5")
    model, master = with_tokenizer(path, tmp_path), free_port()
    servers = [machine(rank, model, tmp_path / str(rank), master, *kind) for rank in (1, 0)]
    with stopped_at_the_end(servers):
        second, first = servers
        first.wait()
        assert answers(first, model, texts) == tokens
        stream = long_answer(first, model, texts[0])
        end, other = (first, second)[dies], (second, first)[dies]
        family = other.family()
        os.killpg(end.process.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=90)
        assert left == []
        assert_fails(stream)
        assert other.log.read_text().count(f"rank {dies} of the processes: the connection is lost") == 1
        servers += [machine(rank, model, tmp_path / f"{rank} again", master, *kind) for rank in (1, 0)]
        servers[-1].wait()
        assert answers(servers[-1], model, texts) == tokens


@pytest.mark.skipif(not cable.CAN_BE_LAID, reason="takes Linux, its `ip`, and the right to make networks")
@pytest.mark.parametrize("kind", [PIPELINE, TENSORS])
def test_a_slow_cable_that_is_pulled(kind: tuple[str, str], reference: Any, tmp_path: Path) -> None:
    """Tokens are one process's, though each packet comes 20 ms late. Without the cable both machines end."""
    path, texts, tokens, _ = reference("qwen3_5")
    model, master = with_tokenizer(path, tmp_path), free_port()
    network, servers = (cable.INTERFACE, cable.ADDRESSES), []
    with cable.laid(delay=0.02) as between, stopped_at_the_end(servers):
        for rank in (1, 0):
            with between.at(rank):
                servers.append(machine(rank, model, tmp_path / str(rank), master, *kind, network=network))
        first = servers[1]
        with between.at(0):
            first.wait()
            assert answers(first, model, texts) == tokens
            stream = long_answer(first, model, texts[0])
        assert between.packets > GREEDY_TOKENS
        between.is_pulled = True
        family = [process for each in servers for process in each.family()]
        _, left = psutil.wait_procs(family, timeout=120)
        assert left == []
        assert_fails(stream)
    for each in servers:
        assert "the connection is lost" in each.log.read_text()


@pytest.mark.parametrize(
    ("stops", "what", "kind"),
    [(1, "worker", PIPELINE), (0, "machine", PIPELINE), (0, "worker", TENSORS), (1, "machine", TENSORS)],
)
def test_one_stops(stops: int, what: str, kind: tuple[str, str], reference: Any, tmp_path: Path) -> None:
    """When processes stop in the middle of a request and their connections stay open, all others end and say why. A
    stopped worker is killed. Other stopped processes end when they continue.
    """
    path, texts, _, _ = reference("qwen3_5")
    model, master = with_tokenizer(path, tmp_path), free_port()
    limit = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"}
    servers = [machine(rank, model, tmp_path / str(rank), master, *kind, **limit) for rank in (1, 0)]
    with stopped_at_the_end(servers):
        second, first = servers
        first.wait()
        stream = long_answer(first, model, texts[0])
        there, here = (first, second)[stops].family(), (second, first)[stops].family()
        stopped = there if what == "machine" else [each for each in there if "Worker" in each.cmdline()[0]]
        for each in stopped:
            each.suspend()
        _, left = psutil.wait_procs(here if what == "machine" else here + there, timeout=180)
        assert left == []
        for each in stopped if what == "machine" else ():
            each.resume()
        _, left = psutil.wait_procs(there, timeout=120)
        assert left == []
        assert_fails(stream)
    logs = [(second, first)[stops].log.read_text(), (first, second)[stops].log.read_text()]
    assert logs[0].count(f"rank {stops} of the processes has not answered for 54 s") == 1
    assert what == "machine" or logs[1].count("has been stopped for 54 s; it is killed") == 1


ABSENT = {
    0: r"init_process_group: expected rank 0 on 127\.0\.0\.1:\d+, got no answer within 20 s",
    1: "init_process_group: expected 2 processes, got none of rank 1 within 20 s",
}


@pytest.mark.parametrize("absent", ABSENT)
def test_one_is_absent(absent: int, reference: Any, tmp_path: Path) -> None:
    """The one that is there ends, and says that the other did not come."""
    model, master = with_tokenizer(reference("qwen3_5")[0], tmp_path), free_port()
    options = (*PIPELINE, "--distributed-timeout-seconds", "20")
    server = machine(1 - absent, model, tmp_path / "log", master, *options)
    with stopped_at_the_end([server]):
        assert left_when_all_end([server], 60) == []
    assert server.process.returncode not in (0, None)
    assert re.search(ABSENT[absent], server.log.read_text()), server.log.read_text()[-3000:]


FAULTS = {
    "version": "init_process_group: expected the same versions in all processes, got torch_gdn ",
    "model": "model: expected the same in all processes, got with_tokenizer (",
    "layers": "VLLM_PP_LAYER_PARTITION: expected the same in all processes, got 2,2 in rank 0 and 1,3 in rank 1",
    "division": "pipeline_parallel_size: expected the same in all processes, got 2 in rank 0 and 1 in rank 1",
    "drafts": "speculative_config: expected the same in all processes, got None in rank 0 and ('ngram', 2) in rank 1",
}
NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}')
KINDS = {"division": (PIPELINE, TENSORS), "drafts": (TENSORS, (*TENSORS, *NGRAM))}


@pytest.mark.parametrize("fault", FAULTS)
def test_two_that_do_not_fit(fault: str, reference: Any, tmp_path: Path) -> None:
    """Each ends by itself, and says why."""
    model, master = with_tokenizer(reference("qwen3_5")[0], tmp_path), free_port()
    other, environ = model, {}
    if fault == "version":
        run_at_start("from torch_gdn import distributed\ndistributed.__version__ = '0.0.9'\n", tmp_path)
        environ["PYTHONPATH"] = environment("mps", [tmp_path])["PYTHONPATH"]
    if fault == "layers":  # layer 1 would be in both
        environ["VLLM_PP_LAYER_PARTITION"] = "1,3"
    if fault == "model":
        (tmp_path / "other").mkdir()
        other = with_tokenizer(model, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    kinds = KINDS.get(fault, (PIPELINE, PIPELINE))
    servers = [machine(0, model, tmp_path / "0", master, *kinds[0])]
    servers.append(machine(1, other, tmp_path / "1", master, *kinds[1], **environ))
    with stopped_at_the_end(servers):
        assert left_when_all_end(servers, 90) == []
    for each in servers:
        assert FAULTS[fault] in each.log.read_text(), each.log.read_text()[-3000:]
