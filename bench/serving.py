"""Times whole servers on the same requests: vLLM on the CPU and transformers' generate(), with torch_gdn and without.

Each runs in a separate process (bench.server) for the whole run and works while the others wait. For each number of
clients all of them are measured in turn, so that other load on the machine affects them all. vLLM
runs in the interpreter that TORCH_GDN_VLLM_PYTHON names, in .venv-vllm (`make test-vllm` makes it), or here.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from bench import results, server
from bench.ceilings import Ceilings
from bench.results import Row
from torch_gdn_check.steps import Skipped

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "TORCH_GDN_VLLM_PYTHON"  # the environment variable for the interpreter that has vLLM
SITE = ROOT / "bench" / "site"  # lets vLLM import a torchvision built for another PyTorch
CLIENTS = (1, 2, 4, 8, 16, 32)
SHORTEST, LONGEST, TOKENS, LEAST_REQUESTS = 32, 300, 48, 4
MOST_ROUNDS = 20
MODEL = f"{server.CONFIG['num_hidden_layers']} layers of Qwen3.5-0.8B"
LATENCIES = ("first token", "first token, p95", "between tokens", "between tokens, p95")


class Contender(NamedTuple):
    arguments: tuple[str, ...]  # bench.server's, before and after the model's folder
    plugin: str  # TORCH_GDN_VLLM


CONTENDERS = {
    "vLLM, torch_gdn": Contender(("vllm",), "cpu"),
    "vLLM": Contender(("vllm",), "off"),
    "transformers, torch_gdn": Contender(("transformers", "enable"), "off"),
    "transformers": Contender(("transformers",), "off"),
}
PAIRS = (("vLLM, torch_gdn", "vLLM"), ("transformers, torch_gdn", "transformers"))


class Server:
    """The process of a contender. `ask` gives it a job and waits for the answer."""

    def __init__(self, contender: Contender, python: str, folder: Path) -> None:
        what, *rest = contender.arguments
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long-lived as the process
        self.process = subprocess.Popen(
            [python, "-m", "bench.server", what, str(folder), *rest],
            cwd=ROOT,
            env=environment(contender.plugin),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, job: server.Job) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Skipped(self.last_error()) from None
        for line in self.process.stdout:  # others log here too
            if line.startswith(server.ANSWER):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise Skipped(self.last_error())

    def last_error(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["no message"]
        return f"exit status {self.process.returncode}: {lines[-1]}"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def environment(plugin: str) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        **os.environ,
        "TORCH_GDN_VLLM": plugin,
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, ROOT))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def interpreter() -> str:
    """Returns the interpreter that has vLLM, or this one if none has."""
    in_environment = ROOT / ".venv-vllm" / "bin" / "python"
    if PYTHON in os.environ:
        return os.environ[PYTHON]
    if importlib.util.find_spec("vllm") is None and in_environment.exists():
        return str(in_environment)
    return sys.executable


@cache
def model() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="torch_gdn_bench_")
    atexit.register(folder.cleanup)
    command = [interpreter(), "-m", "bench.server", "make", folder.name]
    subprocess.run(command, cwd=ROOT, env=environment("off"), check=True, capture_output=True)
    return Path(folder.name)


@cache
def server_of(name: str) -> Server:
    started = Server(CONTENDERS[name], interpreter(), model())
    atexit.register(started.close)
    return started


def prompts(count: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[list[int]]:
    """Draws prompts of random tokens and lengths, the same for all contenders."""
    draw = random.Random(0)
    vocabulary = int(str(server.CONFIG["vocab_size"]))
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


class Measured(NamedTuple):
    """The measurements of all rounds with one number of clients."""

    requests: int
    tokens: int
    seconds: float
    first: list[float]  # from each request's submission to its first token
    between: list[float]  # from each token to the next, for all requests

    @property
    def latencies(self) -> dict[str, float]:
        parts = (statistics.median(self.first), p95(self.first), statistics.median(self.between), p95(self.between))
        return dict(zip(LATENCIES, parts, strict=True))


def p95(values: Sequence[float]) -> float:
    """Returns the smallest value that at least 95 % of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def measured(answers: Sequence[Mapping[str, Any]], tokens: int) -> Measured:
    arrived = [times for answer in answers for times in answer["arrived"]]
    submitted = [time for answer in answers for time in answer["submitted"]]
    wrong = sorted({len(times) for times in arrived} - {tokens})
    if wrong:
        raise ValueError(f"each request is to be answered by {tokens} tokens; some have {', '.join(map(str, wrong))}")
    first = [times[0] - start for times, start in zip(arrived, submitted, strict=True)]
    between = [later - earlier for times in arrived for earlier, later in itertools.pairwise(times)]
    seconds = sum(answer["seconds"] for answer in answers)
    return Measured(len(arrived), tokens * len(arrived), seconds, first, between)


def jobs(quick: bool) -> Iterator[tuple[int, bool]]:
    for clients in CLIENTS[:2] if quick else CLIENTS:
        yield clients, quick


def run(clients: int, quick: bool, ceilings: Ceilings, seconds: float) -> list[Row]:
    """Runs rounds of all contenders in turn, until each has worked for `seconds`."""
    tokens = 3 if quick else TOKENS
    texts = prompts(2 * clients, 3, 5) if quick else prompts(max(LEAST_REQUESTS, 2 * clients))
    job = {"prompts": texts, "clients": clients, "tokens": tokens}
    rows = {name: Row("serving", MODEL, "bfloat16", clients, name, torch.get_num_threads()) for name in CONTENDERS}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(MOST_ROUNDS):
        waiting = [name for name, result in answers.items() if sum(a["seconds"] for a in result) < seconds]
        waiting = [name for name in waiting if not rows[name].note]
        for name in tqdm(waiting, desc=f"{clients} clients", unit="server", leave=False):
            try:
                answers[name].append(ask(name, job))
            except Skipped as reason:
                rows[name].note = f"not run: {reason}"
    for name, result in answers.items():
        if result and not rows[name].note:
            fill(rows[name], measured(result, tokens))
    return list(rows.values())


def ask(name: str, job: server.Job) -> dict[str, Any]:
    warm_up(name)
    return server_of(name).ask(job)


@cache
def warm_up(name: str) -> None:
    server_of(name).ask({"prompts": prompts(4), "clients": 2, "tokens": 4})


def fill(row: Row, measured: Measured) -> None:
    row.seconds = measured.seconds / measured.requests
    row.latencies = measured.latencies
    row.rate = measured.tokens / measured.seconds


def tables(rows: Sequence[Row]) -> list[str]:
    """Tabulates the results, and for pairs the ratio of requests per second with torch_gdn and without."""
    return [latency_table(rows), "", ratio_table(rows)]


def latency_table(rows: Sequence[Row]) -> str:
    heading = ["clients", "", "requests/s", "tokens/s", *(f"{name}, ms" for name in LATENCIES), ""]
    lines = []
    for row in rows:
        if row.seconds is None:
            lines.append([str(row.size), row.contender, *[""] * 6, row.note])
            continue
        times = [results.milliseconds(row.latencies[name]) for name in LATENCIES]
        lines.append([str(row.size), row.contender, f"{1 / row.seconds:.2f}", f"{row.rate:.1f}", *times, row.note])
    return results.markdown(heading, lines)


def ratio_table(rows: Sequence[Row]) -> str:
    """Tabulates ratios. Above 1, the one with torch_gdn is faster."""
    result = {(row.size, row.contender): row for row in rows if row.seconds is not None}
    lines = []
    for size in sorted({size for size, _ in result}):
        for ours, theirs in PAIRS:
            if (size, ours) in result and (size, theirs) in result:
                a, b = result[size, ours], result[size, theirs]
                assert a.seconds is not None and b.seconds is not None
                shares = [b.latencies[name] / a.latencies[name] for name in LATENCIES]
                lines.append([str(size), theirs, *(f"{ratio:.2f} x" for ratio in (b.seconds / a.seconds, *shares))])
    return results.markdown(["clients", "compared with", "requests/s", *LATENCIES], lines)
