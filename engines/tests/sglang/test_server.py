"""Tests `torch_gdn serve` with SGLang over HTTP: 32 streams at once, one that ends after SIGTERM, and nothing left
behind.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from engines.tests.sglang.conftest import GREEDY_TOKENS, environment, processes_of
from tests.helpers.streams import (
    assert_ended_by_sigterm,
    begun,
    events,
    free_port,
    wait_until_ready,
    wait_until_refused,
)

STREAMS = 32
LAST_TOKENS = 60  # of the stream that runs when the server is told to end


class Server:
    def __init__(self, model: Path, log: Path) -> None:
        self.log, self.port = log, free_port()
        pools = ["--max-total-tokens", "4096", "--max-running-requests", "16", "--max-mamba-cache-size", "64"]
        options = ["--dtype", "float32", "--chunked-prefill-size", "64", "--enable-mixed-chunk"]
        serve = [sys.executable, "-m", "torch_gdn", "serve", "--engine", "sglang"]
        command = [*serve, str(model), "--port", str(self.port)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *pools, *options], env=environment(), stdout=file, stderr=file, start_new_session=True
            )

    def kernels(self) -> set[str]:
        """Returns the names of the kernels that are compiled."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=5) as answer:
            return set(json.load(answer)["internal_states"][0]["probe"]["pipelines"])


async def ask(port: int, texts: list[list[int]]) -> list[list[int]]:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:

        async def one(text: list[int]) -> list[int]:
            sampling = {"temperature": 0, "max_new_tokens": GREEDY_TOKENS, "ignore_eos": True}
            request = {"input_ids": text, "sampling_params": sampling, "stream": True}
            tokens: list[int] = []
            async with session.post(f"http://127.0.0.1:{port}/generate", json=request) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        tokens = json.loads(line[6:])["output_ids"]
            return tokens

        return await asyncio.gather(*(one(text) for text in texts))


def test_streams(reference: Any, tmp_path: Path) -> None:
    path, texts, tokens = reference("qwen3_5")
    server = Server(path, tmp_path / "log")
    try:
        wait_until_ready(server.process, server.port, "/health_generate", server.log)
        before = server.kernels()
        answers = asyncio.run(ask(server.port, [texts[i % len(texts)] for i in range(STREAMS)]))
        late = server.kernels() - before
        sampling = {"temperature": 0, "max_new_tokens": LAST_TOKENS, "ignore_eos": True}
        body = {"input_ids": texts[0], "sampling_params": sampling, "stream": True}
        stream = begun(server.port, "/generate", body)
        server.process.send_signal(signal.SIGTERM)
        wait_until_refused(server.port)
        *_, last, done = events(stream)
        assert len(json.loads(last)["output_ids"]) == LAST_TOKENS and done == "[DONE]"
        assert_ended_by_sigterm(server.process.wait(120), server.log.read_text())
    finally:
        server.process.kill()
        left = processes_of(server.process.pid)
    assert answers == [tokens[i % len(texts)] for i in range(STREAMS)]
    assert late == set()
    assert left == []
