"""Tests what `python -m torch_gdn serve` says before a server starts, and what it passes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import torch_gdn.integrations.transformers.__main__ as transformers_serve
from torch_gdn.command_line import SHUTDOWN_TIMEOUT as SECONDS
from torch_gdn.integrations.draining import Drain
from torch_gdn.tools import serve
from torch_gdn_engines.vllm import kv_cache_dtype, versions
from torch_gdn_engines.vllm import serve as vllm_serve

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("engine", "missing", "page"),
    [("sglang", "sglang", "sglang.md"), ("transformers", "transformers", "transformers-serving.md")],
)
def test_a_package_that_is_not_installed_is_named_with_the_page_that_says_how(
    engine: str, missing: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(SystemExit) as ended:
        serve.main(["--engine", engine, "model"])
    title = (DOCS / page).read_text().splitlines()[0].removeprefix("# ")
    assert str(ended.value) == (
        f"python -m torch_gdn serve: expected the package {missing}, which is not installed here: torch_gdn's "
        f'documentation, page "{title}", says how to install it'
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (["model", "--port", "1"], SECONDS),
        (["--shutdown-timeout", "5", "model", "--port", "1"], 5),
        (["model", "--shutdown-timeout=5", "--port", "1"], 5),
        (["--shutdown-timeout", "9", "model", "--port", "1", "--shutdown_timeout", "0"], 0),
    ],
)
def test_the_time_out_may_come_before_or_after_the_model(
    given: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: list[Any] = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(Drain, "install", lambda drain: result.append(drain.seconds))
    monkeypatch.setattr(transformers_serve, "main", lambda drafts: result.append(sys.argv[-2:]))
    serve.main(["--engine", "transformers", *given])
    assert result == [seconds, ["--port", "1"]]


@pytest.mark.parametrize("value", ["-1", "1.5", "soon"])
def test_a_time_out_is_a_whole_number(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["model", f"--shutdown-timeout={value}"])
    assert f"--shutdown_timeout: expected a whole number of seconds, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--kv-cache-dtype", "aura_8v4"], ["--kv_cache_dtype=aura_8v4"]])
def test_auras_dtype_names_the_option_of_vllm_0_32(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version_of_vllm", lambda: "0.32.0")
    with pytest.raises(SystemExit, match=r"""got aura_8v4: pass --additional-config '{"aura": "8v4"}' instead$"""):
        kv_cache_dtype.refuse_in_old_versions(["model", *given])
    kv_cache_dtype.refuse_in_old_versions(["model", "--kv-cache-dtype", "auto"])
    monkeypatch.setattr(versions, "version_of_vllm", lambda: "0.33.0")
    kv_cache_dtype.refuse_in_old_versions(["model", *given])


@pytest.mark.parametrize("rank", [["--node-rank", "1"], ["--node_rank=1"], ["-r", "1"]])
def test_only_the_first_machine_serves(rank: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^--node-rank 1 needs --headless: only rank 0 answers requests$"):
        vllm_serve.require_headless(["model", "--nnodes", "2", *rank])
    vllm_serve.require_headless(["model", *rank, "--headless"])
    vllm_serve.require_headless(["model", *rank, "--data-parallel-size", "2"])  # each of vLLM's replicas may answer
    vllm_serve.require_headless(["model", "--nnodes", "2", "--node-rank", "0"])
