"""The public functions have the types that tests/typing/returns.py says, which mypy checks without running it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import torch_gdn

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install '.[dev]'")
def test_results_have_the_types_that_options_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    monkeypatch.chdir(ROOT)  # where its configuration is
    output, errors, status = api.run(["tests/typing/returns.py"])
    assert status == 0, output + errors


def test_no_function_returns_any() -> None:
    for name in torch_gdn.__all__:
        function = getattr(torch_gdn, name)
        if inspect.isfunction(function):
            returned = inspect.signature(function).return_annotation
            assert returned is not inspect.Signature.empty and "Any" not in str(returned), name
