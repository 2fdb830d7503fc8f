"""Tests the extension and the PyTorch that loads it."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.devices import by_threads
from torch_gdn import _C, _library, _mps, info, tune


@pytest.mark.parametrize("loaded", ["2.14.1", "2.1.0", "3.13.0"])
def test_another_minor_version_of_torch_is_an_error(loaded: str) -> None:
    with pytest.raises(
        ImportError, match=rf"expected torch 2\.13\.0, .* got {loaded}; build torch_gdn for this PyTorch"
    ):
        _library.check_torch("2.13.0", loaded)


@pytest.mark.parametrize("loaded", ["2.13.1", "2.13.0+cpu", "2.13.0a0+git123"])
def test_another_build_of_the_same_version_is_not(loaded: str) -> None:
    _library.check_torch("2.13.0", loaded)


def test_the_extension_knows_what_it_was_built_with() -> None:
    assert torch.__version__.split("+")[0] == _C.built_with_torch


@pytest.mark.parametrize("threads", [1, 2])
def test_info_says_how_many_threads_the_cpu_ops_have(threads: int) -> None:
    assert by_threads(info.system, threads)[0]["threads of torch_gdn on the CPU"] == str(threads)


@pytest.mark.parametrize(
    ("system", "macos", "with_torch", "words"),
    [
        ("darwin", "14.6", "2.15.0", "torch 2.15.0 needs macOS 15 or later (torch 2.13 and 2.14: 14 or later)"),
        ("darwin", "13.7", "2.14.1", "torch 2.14.1 needs macOS 14 or later"),
        ("linux", "", "2.13.0", "python -m mps_simulator -m torch_gdn tune"),
    ],
)
def test_without_a_device_the_reason_is_given(
    system: str, macos: str, with_torch: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", with_torch)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    with pytest.raises(SystemExit) as caught:
        tune.main(["--file", "rows.json"])
    for message in (str(caught.value), info.mps()["available"].replace("torch_gdn info", "torch_gdn tune")):
        assert "this PyTorch has no mps device" in message and words in message and macos in message


def test_an_installed_package_has_no_simulated_device_to_offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(_mps, "PACKAGE", tmp_path / "torch_gdn")
    assert "simulator" not in _mps.why_no_mps("tune")
