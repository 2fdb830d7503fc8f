"""Runs `transformers serve` in this process, with a model and a tokenizer, and clients over HTTP."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integrations.models import VOCABULARY
from torch_gdn.integrations.draining import Drain
from torch_gdn.tools.serve import main

PATIENCE = 300  # seconds after which something is taken to hang


def save(model: Any, folder: Path) -> Path:
    """Saves a model with a tokenizer."""
    model.save_pretrained(folder)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """Adds a tokenizer whose text is the tokens' numbers, so that answers compare token by token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


@dataclass
class Served:
    """A running server, and access to what its continuous batching holds."""

    model: Path
    port: int
    server: Any
    changed: threading.Condition = field(default_factory=threading.Condition)  # a slot was given back
    cancelled: list[str] = field(default_factory=list)  # requests that were active when their clients hung up

    @property
    def scheduler(self) -> Any:
        return self.server._generation_state._cb_manager.scheduler

    def post(self, prompt: Sequence[int], new_tokens: int, stream: bool) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        body = {"model": str(self.model), "prompt": text_of(prompt), "max_tokens": new_tokens, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def completed(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        connection = self.post(prompt, new_tokens, stream=False)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        assert answer.status == 200, body
        return [int(word) for word in json.loads(body)["choices"][0]["text"].split()]

    def given_up(self, prompt: Sequence[int]) -> None:
        """Reads the first event of an answer that would be too long to end by itself, and hangs up."""
        connection = self.post(prompt, 10**6, stream=True)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        connection.sock.close()
        answer.close()

    def wait_until_idle(self) -> Any:
        """Waits until no request has a slot, and returns the cache."""
        cache = self.scheduler.cache
        with self.changed:
            assert self.changed.wait_for(lambda: not cache.states.slot_of, PATIENCE), cache.states.slot_of
        return cache


def all_at_once(served: Served, prompts: Sequence[list[int]], cancelled: Sequence[int], new_tokens: int) -> list[Any]:
    """Runs one client per prompt. Returns the tokens of those that wait for them, and None for the others."""

    def client(number: int) -> list[int] | None:
        if number in cancelled:
            return served.given_up(prompts[number])
        return served.completed(prompts[number], new_tokens)

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(client, range(len(prompts))))


@contextmanager
def serving(model: Path, device: str, monkeypatch: Any, **options: Any) -> Iterator[Served]:
    from transformers.cli.serve import Serve
    from transformers.generation.continuous_batching.scheduler import Scheduler

    server = Serve(
        str(model),
        continuous_batching=True,
        device=device,
        attn_implementation="sdpa",
        host="127.0.0.1",
        port=0,
        log_level="error",
        non_blocking=True,
        **options,
    )
    with running(server, model) as served:
        watch_scheduler(Scheduler, served, monkeypatch)
        yield served


@contextmanager
def running(server: Any, model: Path) -> Iterator[Served]:
    """Yields a server that starts in a thread, and ends it."""
    try:
        while not server.server.started:
            assert server._thread.is_alive(), "the server ended"
            server._thread.join(0.01)
        yield Served(model, server.server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        server.kill_server()
        server._thread.join(PATIENCE)
        assert not server._thread.is_alive()


@contextmanager
def command_running(model: Path, monkeypatch: Any, *options: str) -> Iterator[Served]:
    """Runs `python -m torch_gdn serve --engine transformers` in this process."""
    from transformers.cli.serve import Serve

    servers: list[Any] = []
    start = Serve.start_server
    monkeypatch.setattr(Serve, "start_server", lambda server: (servers.append(server), start(server)))
    monkeypatch.setattr(Drain, "install", lambda drain: None)  # which would stay in uvicorn's classes
    monkeypatch.setattr(sys, "argv", [])
    place = ["--host", "127.0.0.1", "--port", "0", "--log-level", "error", "--non-blocking"]
    with suppress(SystemExit):
        main(["--engine", "transformers", *options, str(model), "--device", "cpu", *place])
    with running(servers[0], model) as served:
        yield served


def watch_scheduler(scheduler: Any, served: Served, monkeypatch: Any) -> None:
    clear, finish = scheduler.clear_cancelled_requests, scheduler.finish_request

    def clear_cancelled_requests(self: Any) -> Any:
        served.cancelled.extend(self._requests_to_cancel & self.active_requests.keys())
        return notified(clear(self))

    def notified(result: Any) -> Any:
        with served.changed:
            served.changed.notify_all()
        return result

    monkeypatch.setattr(scheduler, "clear_cancelled_requests", clear_cancelled_requests)
    monkeypatch.setattr(scheduler, "finish_request", lambda self, request: notified(finish(self, request)))
