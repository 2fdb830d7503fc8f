"""Tests that mypy accepts tests/typing/returns.py, which it checks without running it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install '.[dev]'")
def test_calls_as_users_write_them_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    monkeypatch.chdir(ROOT)  # for its configuration
    output, errors, status = api.run(["tests/typing/returns.py"])
    assert status == 0, output + errors
