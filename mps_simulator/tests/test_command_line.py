"""Tests python -m mps_simulator, and activation in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mps_simulator.__main__ import main


@pytest.fixture
def output(folder: Path) -> Callable[..., str]:
    """Returns what Python prints in a separate process."""

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout

    return run


def test_running_code(output: Callable[..., str]) -> None:
    code = "import sys, torch; print(torch.ones(2, device='mps').sum().item(), sys.argv[1:])"
    assert output("-m", "mps_simulator", "-c", code, "a", "b") == "2.0 ['a', 'b']\n"


def test_running_a_script(tmp_path: Path, output: Callable[..., str]) -> None:
    (tmp_path / "helper.py").write_text("import torch\ndevice = torch.device('mps')\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch\nfrom helper import device\nfrom mps_simulator import settings as given\n"
        "print(torch.arange(3, device=device).tolist(), sys.argv[1], given.watch, given.perturb, given.seed)\n"
    )
    arguments = ("-m", "mps_simulator", "--no-watch", "--perturb", "--seed", "3", str(tmp_path / "script.py"), "word")
    assert output(*arguments) == "[0, 1, 2] word False True 3\n"


BACKWARD = """
import contextvars, time, torch

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

leaf = torch.ones(4, device="mps", requires_grad=True)
held = contextvars.ContextVar("held")
held.set(Slow())  # torch copies the context for a backward
result = leaf.sum()
result.backward()
held.set(None)
print(leaf.grad.tolist())
"""


def test_a_script_may_end_while_autograds_thread_drops_its_backward(output: Callable[..., str]) -> None:
    """The thread asks for Python's lock in a destructor. If Python ends meanwhile, the process aborts."""
    assert output("-m", "mps_simulator", "-c", BACKWARD) == "[1.0, 1.0, 1.0, 1.0]\n"


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
    monkeypatch.setattr(sys, "argv", ["mps_simulator", *arguments])
    with pytest.raises(SystemExit, match=re.escape(words)):
        main()


def test_mps_may_be_asked_for_before_activation(output: Callable[..., str]) -> None:
    code = (
        "import torch; assert not torch.backends.mps.is_available(); import mps_simulator; mps_simulator.activate();"
        "assert torch.backends.mps.is_available(); print(torch.ones(2, device='mps').tolist())"
    )
    assert output("-c", code) == "[1.0, 1.0]\n"


def test_a_variable_has_the_instruction_set(output: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import mps_simulator; mps_simulator.activate(); print(mps_simulator.settings.march)"
    for value, expected in (("x86-64-v3", "x86-64-v3"), ("", "native")):
        monkeypatch.setenv("MPS_SIMULATOR_MARCH", value)
        assert output("-c", code) == f"{expected}\n"
