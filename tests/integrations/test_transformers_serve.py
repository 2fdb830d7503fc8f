"""Tests `transformers serve` with hybrid models over HTTP: 32 clients get the tokens of `generate()`, 8 hang up, and a
stream ends after SIGTERM.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.devices import kernels_run, ready
from tests.helpers.streams import (
    PATIENCE,
    assert_ended_by_sigterm,
    begun,
    events,
    free_port,
    wait_until_ready,
    wait_until_refused,
)
from tests.integrations.drafted import Steps, files, loaded
from tests.integrations.http_serving import add_tokenizer, all_at_once, command_running, save, serving, text_of
from tests.integrations.models import random_model
from tests.integrations.serving import alone, assert_nothing_is_held, other_version, prompts_of
from torch_gdn.integrations import transformers

if reason := other_version("continuous batching"):
    pytest.skip(reason, allow_module_level=True)

CLIENTS, GIVEN_UP, NEW_TOKENS = 32, 8, 6
KERNELS = ("causal_conv1d", "fused_recurrent_gated_delta_rule", "rms_norm_gated")


@pytest.fixture(autouse=True)
def _batching() -> Iterator[None]:
    yield
    transformers.disable()


def lengths() -> list[int]:
    """Returns lengths of prompts from 1 to 300 tokens, including both."""
    return [1, 300, *random.Random(0).sample(range(2, 300), CLIENTS - 2)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("device_name", ["cpu", "mps"])
def test_32_clients(device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, device = prompts_of(*lengths()), ready(device_name)
    model = random_model("qwen3_next")
    with torch.no_grad():
        expected: list[list[int] | None] = [*alone(model, prompts, NEW_TOKENS)]
    given_up = range(3, CLIENTS, CLIENTS // GIVEN_UP)
    for number in given_up:
        expected[number] = None
    transformers.enable(continuous_batching=True)
    options = {"cb_max_batch_tokens": 64, "cb_block_size": 16, "cb_num_blocks": 512}
    with (
        kernels_run(device, *KERNELS),
        serving(save(model, tmp_path / "model"), device_name, monkeypatch, **options) as served,
    ):
        result = all_at_once(served, prompts, given_up, NEW_TOKENS)
        cache = served.wait_until_idle()
        assert cache.max_batch_tokens == 64
        assert_nothing_is_held(cache)
    assert result == expected
    assert len(served.cancelled) == GIVEN_UP
    assert transformers.status().fallbacks == {}


@pytest.mark.sweep(1, seeds=3)
def test_a_stream_ends_after_sigterm(tmp_path: Path) -> None:
    model, log, port = save(random_model("qwen3_next"), tmp_path / "model"), tmp_path / "log", free_port()
    command = [sys.executable, "-m", "torch_gdn", "serve", "--engine", "transformers", str(model)]
    options = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    memory = ["--cb-max-batch-tokens", "64", "--cb-block-size", "16", "--cb-num-blocks", "64"]
    with log.open("w") as file, subprocess.Popen([*command, *options, *memory], stdout=file, stderr=file) as server:
        try:
            wait_until_ready(server, port, "/health", log)
            body = {"model": str(model), "prompt": text_of(range(1, 40)), "max_tokens": 60, "stream": True}
            stream = begun(port, "/v1/completions", body)
            server.send_signal(signal.SIGTERM)
            wait_until_refused(port)
            result = [json.loads(event) for event in events(stream) if event != "[DONE]"]
            assert [x["choices"][0].get("finish_reason") for x in result if x["choices"]][-1] == "length"
            assert_ended_by_sigterm(server.wait(PATIENCE), log.read_text())
        finally:
            server.kill()


def test_drafts_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those without drafts, from fewer steps of the model."""
    folder, (prompt,) = add_tokenizer(files(tmp_path, "qwen3_5", "sometimes")), prompts_of(20)
    with torch.no_grad():
        [expected] = alone(loaded(folder), [prompt], 12)
    with command_running(folder, monkeypatch, "--drafts", "2") as served:
        assert served.completed(prompt, 1) == expected[:1]
        (manager,) = served.server._model_manager.loaded_models.values()
        steps = Steps(manager.model)
        assert served.completed(prompt, 12) == expected
        assert 4 <= steps.taken < 12 and len(set(expected)) > 4
        stream = events(served.post(prompt, 12, stream=True).getresponse())
    parts = [json.loads(event)["choices"] for event in stream if event != "[DONE]"]
    assert "".join(part[0]["text"] for part in parts if part) == text_of(expected)


def test_the_command_line_is_transformers_own_on_torch_gdn(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy
    import sys

    from transformers.cli import transformers as command

    seen = []
    monkeypatch.setattr(sys, "argv", ["__main__.py", "serve", "a model", "--continuous-batching"])
    monkeypatch.setattr(command, "main", lambda: seen.append((sys.argv, transformers.status().replaced)))
    runpy.run_module("torch_gdn.integrations.transformers", run_name="__main__")
    [(arguments, replaced)] = seen
    assert arguments == ["transformers", "serve", "a model", "--continuous-batching"]
    assert "continuous batching" in replaced
