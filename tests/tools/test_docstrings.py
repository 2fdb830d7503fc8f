"""Docstrings: their examples run, and they speak of every argument."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable

import pytest

import torch_gdn

FUNCTIONS = {x.__name__: x for x in (getattr(torch_gdn, n) for n in torch_gdn.__all__) if inspect.isfunction(x)}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


@each_function
def test_the_example_runs(function: Callable[..., object]) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    assert sum(len(test.examples) for test in tests) >= 2, "no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@each_function
def test_every_argument_is_explained(function: Callable[..., object]) -> None:
    doc = inspect.getdoc(function) or ""
    if "Args and errors are those of" in doc:
        return
    explained = doc.split("Args:")[1].split("Returns:")[0]
    for argument in inspect.signature(function).parameters:
        assert f"{argument}:" in explained or f"{argument}, " in explained, argument


@each_function
def test_results_and_errors_are_explained(function: Callable[..., object]) -> None:
    doc = inspect.getdoc(function) or ""
    assert "Returns:" in doc
    if function.__name__.startswith("prepare_"):
        return  # plain PyTorch, whose errors are PyTorch's
    assert "Raises:" in doc or "Args and errors are those of" in doc


def test_fla_names_are_the_same_functions() -> None:
    pairs = {
        "chunk_scaled_dot_kkt_fwd": "chunk_scaled_dot_kkt",
        "recompute_w_u_fwd": "recompute_w_u",
        "chunk_gated_delta_rule_fwd_h": "chunk_fwd_h",
    }
    for fla_name, name in pairs.items():
        assert getattr(torch_gdn, fla_name) is getattr(torch_gdn, name)
