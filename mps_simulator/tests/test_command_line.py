"""python -m simulator, and activation in a process of its own."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


def run_simulator(*arguments: str) -> str:
    command = [sys.executable, "-m", "simulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout


def test_running_code() -> None:
    code = "import sys, torch; print(torch.ones(2, device='mps').sum().item(), sys.argv[1:])"
    assert run_simulator("-c", code, "a", "b") == "2.0 ['a', 'b']\n"


def test_running_a_script(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import torch\ndevice = torch.device('mps')\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch\nfrom helper import device\nprint(torch.arange(3, device=device).tolist(), sys.argv[1])\n"
    )
    assert run_simulator("--seed", "3", str(tmp_path / "script.py"), "word") == "[0, 1, 2] word\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "one", "x.py"], "--seed: expected a number"),
        (["-c"], "-c: expected code"),
        (["no_such_script.py"], "no script 'no_such_script.py'"),
    ],
    ids=["seed", "code", "script"],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator", *arguments])
    with pytest.raises(SystemExit, match=re.escape(words)):
        runpy.run_module("simulator.__main__", run_name="__main__")


def test_mps_may_be_asked_for_before_activation() -> None:
    code = (
        "import torch; assert not torch.backends.mps.is_available(); import simulator; simulator.activate();"
        "assert torch.backends.mps.is_available(); print(torch.ones(2, device='mps').tolist())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert result.stdout == "[1.0, 1.0]\n"
