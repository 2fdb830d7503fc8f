"""Tests the forms of a setting: `~`, relative, empty, unset, set twice, changed while the process runs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bench.installed
import mps_simulator.build
from evidence.proof.mac import wheels
from torch_gdn import self_test
from torch_gdn._C import prefill_algorithm as chosen_algorithm
from torch_gdn.self_test import verdicts
from torch_gdn.tools import tune, tuning_cache
from torch_gdn.tools.tuning_cache import Row
from torch_gdn_engines import sglang, vllm

NOBODY = "~there_is_no_such_user/cache"
Place = Callable[[], Path | None]


PLACES: dict[str, tuple[Place, str | None]] = {  # for each variable, the function that finds its path, and the default
    tuning_cache.VARIABLE: (tuning_cache.path, ".config/torch_gdn/tuning_cache.json"),
    "MPS_SIMULATOR_CACHE": (mps_simulator.build.cache_directory, ".cache/mps_simulator"),
    "TORCH_GDN_CACHE": (wheels.cache_directory, ".cache/torch_gdn"),
    "TORCH_GDN_GGML": (lambda: bench.installed.library_folder("no_such_package", "TORCH_GDN_GGML"), None),
}


@pytest.mark.parametrize("variable", PLACES)
def test_a_path(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable is read again when it is needed."""
    place, otherwise = PLACES[variable]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, path in (("~/a", tmp_path / "home" / "a"), (str(tmp_path / "b"), tmp_path / "b"), ("c", tmp_path / "c")):
        monkeypatch.setenv(variable, value)
        result = place()
        assert result is not None and result.absolute() == path
    default = tmp_path / "home" / otherwise if otherwise else None
    monkeypatch.setenv(variable, "")
    assert place() == (None if variable == tuning_cache.VARIABLE else default)
    monkeypatch.delenv(variable)
    assert place() == default


def test_a_table_that_cannot_be_read_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch_gdn must not fail because of an unknown user, a folder, or a name that is too long. The self-test
    then tests in every process.
    """
    for value in (NOBODY, str(tmp_path), "x" * 5000):
        monkeypatch.setenv(tuning_cache.VARIABLE, value)
        with pytest.warns(UserWarning, match="the heuristic picks prefill algorithms: "):
            tuning_cache.install_file()
    monkeypatch.setenv(tuning_cache.VARIABLE, NOBODY)
    verdicts.change("machine", {})
    assert verdicts.read("machine") == {}
    with pytest.raises(SystemExit, match=rf"^--file: {tuning_cache.VARIABLE}: expected a path, got '{NOBODY}'"):
        tune.main([])
    with pytest.raises(SystemExit, match=r"^--file: Could not determine home directory"):
        tune.main([f"--file={NOBODY}"])


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user may have no entry. There is then no file, and no warning."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv(tuning_cache.VARIABLE)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert tuning_cache.path() is None
    tuning_cache.install_file()
    verdicts.change("machine", {})
    assert verdicts.read("machine") == {}
    with pytest.raises(SystemExit, match=r"^--file: expected a file to write, since .* is empty, or you have no home"):
        tune.main([])


def test_a_table_that_is_installed_twice_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cores = "Apple M1", 8
    key = f"{device}, {cores} cores"
    try:
        for algorithm in ("chunked", "recurrent"):
            file = tmp_path / algorithm
            tuning_cache.write(file, {key: [Row(64, 128, 128, algorithm)]})
            monkeypatch.setenv(tuning_cache.VARIABLE, str(file))
            tuning_cache.install_file()
            assert chosen_algorithm(64, 32, 128, 128, device, cores)[0] == algorithm
        for value in ("", str(tmp_path / "none")):
            monkeypatch.setenv(tuning_cache.VARIABLE, value)
            tuning_cache.install_file()  # this installs nothing, and removes nothing
        assert tuning_cache.path() == tmp_path / "none"
        assert chosen_algorithm(64, 32, 128, 128, device, cores)[0] == "recurrent"
    finally:
        tuning_cache.install({})


def vllm_mode() -> None:
    vllm.mode()


WORDS = {self_test.VARIABLE: self_test.mode, "TORCH_GDN_VLLM": vllm_mode, "TORCH_GDN_SGLANG": sglang.register}


@pytest.mark.parametrize("variable", WORDS)
def test_a_word(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word is read at each use. Errors name an empty word, one in capitals, and one with a space."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for value in ("", "OFF", "auto ", "1"):
        monkeypatch.setenv(variable, value)
        with pytest.raises((ValueError, SystemExit), match=rf"^{variable}: expected one of .*off.*, got '{value}'$"):
            WORDS[variable]()
    monkeypatch.setenv(variable, "off")
    WORDS[variable]()
    monkeypatch.delenv(variable)
    WORDS[variable]()


def test_the_isa_is_read_once() -> None:
    """Changing ATEN_CPU_CAPABILITY after the first op changes no bit."""
    program = (
        "import os, torch, torch_gdn\n"
        "x = torch.linspace(-1, 1, 7 * 65).view(1, 7, 65)\n"
        "first = torch_gdn.l2norm(x)\n"
        "os.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
        "assert torch.equal(torch_gdn.l2norm(x), first)\n"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "nonsense"}
    finished = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
