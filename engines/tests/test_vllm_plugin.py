"""The part of the plugin that needs no vLLM: entry points, modes, the command."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.helpers.devices import ready
from torch_gdn_engines import vllm
from torch_gdn_engines.vllm import compat, seeds

ROOT = Path(__file__).resolve().parents[2]


class Owner:
    @staticmethod
    def static() -> None: ...


def test_entry_points_are_declared() -> None:
    for group, function in (("vllm.platform_plugins", "platform"), ("vllm.general_plugins", "register")):
        values = {point.value for point in importlib.metadata.entry_points(group=group, name="torch_gdn")}
        assert values == {f"torch_gdn_engines.vllm:{function}"}


@pytest.mark.parametrize(
    "mode, has_mps, wanted",
    [("auto", True, True), ("auto", False, False), ("mps", False, True), ("cpu", True, False), ("off", True, False)],
)
def test_where_the_platform_is_chosen(mode: str, has_mps: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is the platform's own to raise, so that mode mps chooses it even without a device."""
    monkeypatch.setenv("TORCH_GDN_VLLM", mode)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert (vllm.platform() is not None) == wanted


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="the sentence is for a PyTorch without mps")
def test_serve_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_gdn_engines.vllm.serve", "model"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.search("this PyTorch has no mps device.*; TORCH_GDN_VLLM=cpu serves on the CPU", done.stderr)


def test_an_event_of_mps_ends_a_caller_that_polls() -> None:
    x = torch.ones(3, device=ready("mps"))
    event = compat.Event()
    event.record()
    assert event.query() and x.sum().item() == 3


class Runner:
    """Stands for vLLM's: request 1 has a seed, and its tokens are discarded."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(num_reqs=2, generators={1: torch.Generator().manual_seed(3)})
        self.discard_request_mask = SimpleNamespace(np=numpy.array([False, True]))

    def _sample(self) -> None:
        self.input_batch.generators[1].manual_seed(4)

    def _bookkeeping_sync(self) -> None:
        raise RuntimeError("no memory")


def test_wraps_no_static_method() -> None:
    with pytest.raises(TypeError, match=r"Owner\.static: expected a function or a class method, got a staticmethod"):
        compat.wrap({f"{__name__}.Owner.static": lambda original: original()})


def test_an_error_leaves_the_generators_of_discarded_tokens() -> None:
    runner: Any = type("KeepsSeeds", (seeds.KeepsSeeds, Runner), {})()
    runner._sample()
    with pytest.raises(RuntimeError, match="no memory"):
        runner._bookkeeping_sync()
    assert runner.input_batch.generators[1].initial_seed() == 3
