"""Tests that the list of `make quick` names tests that exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import QUICK, is_quick
from tests.sweeps import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sweep(1, seeds=3)
def test_each_line_names_tests() -> None:
    named = {line.partition("::")[0] for line in QUICK}
    files = sorted(each if each.startswith("check/") else f"tests/{each}" for each in named)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick", *files]
    environment = os.environ | {VARIABLE: "all"}  # a sample may leave out a case that a line names
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = [line.removeprefix("tests/") for line in finished.stdout.splitlines() if "::" in line]
    assert [line for line in QUICK if not any(test.startswith(line) for test in result)] == []
    assert all(map(is_quick, result))
