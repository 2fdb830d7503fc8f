"""Tests python -m torch_gdn COMMAND: the commands, their help, and the servers that `serve` starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import torch_gdn.integrations.transformers.__main__ as transformers_serve
from torch_gdn import __main__ as command
from torch_gdn import serve

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_without_a_command_it_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) is None
    printed, page = capsys.readouterr().out, (DOCS / "tools.md").read_text()
    for name in command.COMMANDS:
        assert f"python -m torch_gdn {name}" in printed and f"## {name}\n" in page


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_helps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m torch_gdn {name}" in capsys.readouterr().out


def test_an_unknown_command_is_an_error_that_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["inform"])
    assert ended.value.code == 2 and "'info', 'check'" in capsys.readouterr().err


def test_arguments_go_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["fits", "model", "--tokens", "0"])
    assert "--tokens and --requests: expected at least 1, got 0 and 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--port", "1"], ["--attn-implementation", "sdpa", "--port", "1"]),
        (["--attn-implementation", "eager"], ["--attn-implementation", "eager"]),
    ],
)
def test_transformers_serves(given: list[str], passed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(transformers_serve, "main", lambda: None)
    command.main(["serve", "--engine", "transformers", "model", *given])
    assert sys.argv == ["transformers", "serve", "model", "--continuous-batching", *passed]


def test_sglang_serves_on_mps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("TORCH_GDN_SGLANG", "auto")
    monkeypatch.setattr(serve, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(serve.runpy, "run_module", lambda *_, **__: started.append(sys.argv))
    monkeypatch.setattr(serve, "why_no_mps", lambda: "no device")
    with pytest.raises(SystemExit, match="python -m torch_gdn serve: no device"):
        command.main(["serve", "--engine", "sglang", "model"])
    monkeypatch.setattr(serve, "why_no_mps", lambda: "")
    command.main(["serve", "--engine", "sglang", "model", "--port", "1"])
    assert started == [["sglang", "--model-path", "model", "--device", "mps", "--port", "1"]]


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="SGLang is not installed here"):
        command.main(["serve", "--engine", "sglang", "model"])
