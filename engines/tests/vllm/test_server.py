"""`torch_gdn serve` with vLLM, asked over HTTP by OpenAI's client: 33 streams at once, one that ends after SIGTERM, and
nothing left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.tests.vllm.conftest import GREEDY_TOKENS, environment
from tests.helpers.small_models import with_tokenizer
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
    def __init__(self, device: str, model: Path, log: Path, *more: str, **environ: str) -> None:
        self.port, self.log = free_port(), log
        options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "64", "--enforce-eager"]
        pools = ["--kv-cache-memory-bytes", str(1 << 28), "--max-num-seqs", "16", "--no-enable-prefix-caching"]
        variables = {**environment(device), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environ}
        serve = [sys.executable, "-m", "torch_gdn", "serve", str(model), "--port", str(self.port)]
        command = [*serve, *options, *pools, *more]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, start_new_session=True)

    def wait(self) -> None:
        wait_until_ready(self.process, self.port, "/health", self.log)

    def family(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def stop(self, by: signal.Signals) -> list[psutil.Process]:
        """SIGINT comes to all of its processes, as from a terminal; the processes that are left."""
        if self.process.poll() is not None:
            return []
        family = self.family()
        if by == signal.SIGINT:
            os.killpg(self.process.pid, by)
        else:
            self.process.send_signal(by)
        _, left = psutil.wait_procs(family, timeout=60)
        for process in left:
            process.kill()
        return left


async def ask(port: int, model: str, texts: list[list[int]], seeded: list[int]) -> list[str]:
    """The greedy answers, and last that of a seeded request whose prompt comes in parts."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=900, max_retries=0)

    async def one(text: list[int], temperature: float = 0, seed: int | None = None) -> str:
        stream = await client.completions.create(
            model=model,
            prompt=text,
            max_tokens=GREEDY_TOKENS,
            temperature=temperature,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([part.choices[0].text async for part in stream if part.choices])

    return await asyncio.gather(*(one(text) for text in texts), one(seeded, temperature=1, seed=7))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_streams(device: str, by: signal.Signals, reference: Any, tmp_path: Path) -> None:
    path, texts, tokens, _ = reference("qwen3_next")
    model = with_tokenizer(path, tmp_path)
    server = Server(device, model, tmp_path / "log")
    try:
        server.wait()
        asked = [texts[i % len(texts)] for i in range(STREAMS)]
        *answers, sampled = asyncio.run(ask(server.port, str(model), asked, seeded=max(texts, key=len)))
        if by == signal.SIGTERM:
            body = {"model": str(model), "prompt": texts[0], "max_tokens": LAST_TOKENS, "ignore_eos": True}
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = begun(server.port, "/v1/completions", {**body, **options})
            server.process.send_signal(by)
            wait_until_refused(server.port)
            *_, usage, done = events(stream)  # vLLM merges the tokens that a slow reader has not taken
            assert json.loads(usage)["usage"]["completion_tokens"] == LAST_TOKENS and done == "[DONE]"
            assert_ended_by_sigterm(server.process.wait(120), server.log.read_text())
    finally:
        left = server.stop(by)
    wanted = [bytes(each).decode() for each in tokens]
    assert answers == [wanted[i % len(texts)] for i in range(STREAMS)]
    assert sampled
    assert left == []
