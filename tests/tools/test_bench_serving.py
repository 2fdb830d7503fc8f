"""Tests the benchmark's serving section with stub engines: what servers answer, and the arithmetic with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import plots, server, serving
from bench.ceilings import Ceilings
from bench.results import Row
from torch_gdn_check.steps import Skipped

CEILINGS = Ceilings(torch.device("cpu"))
ANSWER = {"submitted": [0.0, 1.0], "arrived": [[0.5, 0.6, 0.9], [3.0, 3.2, 3.3]], "seconds": 4.0}


class StubEngine:
    """Behaves like vLLM's engine: each step gives each request a token, and returned names have a suffix."""

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}
        self.at_once: list[int] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert set(prompt) == {"prompt_token_ids"}
        self.running[name] = SimpleNamespace(left=params, tokens=[])

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.at_once.append(len(self.running))
        outputs = []
        for name, request in list(self.running.items()):
            request.tokens.append(7)
            finished = len(request.tokens) == request.left
            result = SimpleNamespace(token_ids=list(request.tokens))
            outputs.append(SimpleNamespace(request_id=f"{name}-abc", outputs=[result], finished=finished))
            if finished:
                del self.running[name]
        return outputs


def job(requests: int, clients: int, tokens: int) -> server.Job:
    return {"prompts": [[1, 2]] * requests, "clients": clients, "tokens": tokens}


def test_a_client_of_an_engine_has_one_request_in_flight() -> None:
    engine = StubEngine()
    answer = server.serve_batched(job(requests=5, clients=2, tokens=3), engine, 3, "job0")
    assert engine.at_once == [2] * 6 + [1] * 3
    assert [len(times) for times in answer["arrived"]] == [3] * 5
    for submitted, arrived in zip(answer["submitted"], answer["arrived"], strict=True):
        assert [submitted, *arrived, answer["seconds"]] == sorted([submitted, *arrived, answer["seconds"]])
    assert answer["submitted"][2] >= answer["arrived"][0][-1] > answer["submitted"][1]


def test_more_clients_than_requests() -> None:
    engine = StubEngine()
    answer = server.serve_batched(job(requests=2, clients=8, tokens=1), engine, 1, "job0")
    assert engine.at_once == [2] and len(answer["arrived"]) == 2


def test_generate_takes_requests_in_the_order_of_their_submission() -> None:
    def generate(prompt: list[int], tokens: int, arrive: Callable[[], None]) -> None:
        for _ in range(tokens):
            arrive()

    answer = server.serve_sequentially(job(requests=4, clients=2, tokens=2), generate)
    submitted, arrived = answer["submitted"], answer["arrived"]
    assert [len(times) for times in arrived] == [2] * 4
    assert submitted[1] < arrived[0][0] < arrived[0][1] < arrived[1][0]  # the second waits for the first
    assert arrived[0][1] < submitted[2] < arrived[1][0]  # the first client's next one follows the second's
    assert arrived[1][1] < submitted[3] < arrived[2][0]


def test_statistics_by_hand() -> None:
    result = serving.measured([ANSWER], tokens=3)
    assert (result.requests, result.tokens, result.seconds) == (2, 6, 4.0)
    assert result.first == [0.5, 2.0] and result.between == pytest.approx([0.1, 0.3, 0.2, 0.1])
    expected = {"first token": 1.25, "first token, p95": 2.0, "between tokens": 0.15, "between tokens, p95": 0.3}
    assert result.latencies == pytest.approx(expected)


def test_rounds_are_one_measurement() -> None:
    result = serving.measured([ANSWER, ANSWER], tokens=3)
    assert (result.requests, result.tokens, result.seconds) == (4, 12, 8.0)
    assert len(result.first) == 4 and len(result.between) == 8


def test_p95_leaves_a_twentieth_above() -> None:
    assert serving.p95([float(i) for i in range(100, 0, -1)]) == 95.0
    assert serving.p95([1.0]) == 1.0


def test_missing_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="answered by 4 tokens; some have 3"):
        serving.measured([ANSWER], tokens=4)


def test_prompts_are_the_same_each_time_and_fit() -> None:
    texts = serving.prompts(20)
    assert texts == serving.prompts(20) and texts[:5] == serving.prompts(5)
    lengths = {len(text) for text in texts}
    assert min(lengths) >= serving.SHORTEST and max(lengths) <= serving.LONGEST and len(lengths) > 10


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Uses 1 and 2 clients. The plugin's engine takes half as long, and transformers with it does not start."""
    asked: list[str] = []

    def ask(name: str, job: server.Job) -> dict[str, Any]:
        asked.append(name)
        if name == "transformers, torch_gdn":
            raise Skipped("exit status 1: no such thing")
        scale = 0.5 if name == "vLLM, torch_gdn" else 1.0
        count = len(job["prompts"])
        arrived = [[scale * (i + 1) for i in range(job["tokens"])]] * count
        return {"submitted": [0.0] * count, "arrived": arrived, "seconds": scale * 8}

    monkeypatch.setattr(serving, "ask", ask)
    result = [row for clients in (1, 2) for row in serving.run(clients, True, CEILINGS, 6.0)]
    first_round, second_round = [*serving.CONTENDERS], ["vLLM, torch_gdn"]  # 4 seconds are too short
    assert asked == 2 * (first_round + second_round)
    return result


def test_rows_of_a_run(rows: list[Row]) -> None:
    ours, theirs, missing, _ = rows[4:]
    assert ours.size == 2 and ours.seconds == 4 / 4 and theirs.seconds == 8 / 4  # 2 clients, 4 requests a round
    assert ours.rate == 3.0 and theirs.rate == 1.5
    assert missing.seconds is None and missing.note == "not run: exit status 1: no such thing"
    latencies, _, ratios = serving.tables(rows)
    assert latencies.splitlines()[6].split(" | ")[:4] == ["| 2", "vLLM, torch_gdn", "1.00", "3.0"]
    assert "| transformers, torch_gdn |  |  |" in latencies and "no such thing" in latencies
    assert ratios.splitlines()[2:] == [f"| {n} | vLLM | " + " | ".join(["2.00 x"] * 5) + " |" for n in (1, 2)]


def test_the_plot(rows: list[Row], tmp_path: Path) -> None:
    plots.serving(rows, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").stat().st_size > 10_000


def test_a_server_that_ends_is_reported_by_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving, "environment", lambda plugin: {"PYTHONPATH": str(serving.ROOT)})
    contender = serving.Contender(("nothing of that name",), "off")
    started = serving.Server(contender, sys.executable, tmp_path / "no such folder")
    with pytest.raises(Skipped, match=r"exit status 1: .*no such folder"):
        started.ask(job(1, 1, 1))
    started.close()
