"""Tests the extension and the PyTorch that loads it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import torch_gdn
from tests.helpers.devices import by_threads
from torch_gdn import _C, _library, _mps
from torch_gdn.tools import info, tune

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_extension_has_the_version_of_the_sources() -> None:
    assert _C.version == torch_gdn.__version__
    assert str(Version(torch_gdn.__version__)) == torch_gdn.__version__  # as metadata spells it


# Finds modules of torch_gdn in this checkout, as the finder of an editable install does, after all others.
FINDER = f"""
import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(ROOT / "torch_gdn")!r}]) if name.startswith("torch_gdn.") else None
sys.meta_path.append(Finder)
"""
LOADS = "import torch_gdn; print(torch_gdn.__version__, torch_gdn._C.__file__)"


def copy_of(checkout: Path, links: bool = False) -> Path:
    """Copies the sources without what was built."""
    ignored = shutil.ignore_patterns("_C.*.so", "__pycache__")
    copy = os.symlink if links else shutil.copyfile
    shutil.copytree(ROOT / "torch_gdn", checkout / "torch_gdn", ignore=ignored, copy_function=copy)
    shutil.copytree(ROOT / "shaders", checkout / "shaders")
    shutil.copyfile(ROOT / "pyproject.toml", checkout / "pyproject.toml")
    return checkout


def load(folder: Path, before: str = FINDER) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + LOADS]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


BUILT = next((ROOT / "torch_gdn").glob("_C.*.so"))


def test_another_copys_extension_is_an_error(tmp_path: Path) -> None:
    """Two clones share an environment, and the one that was not built has the other one's extension."""
    clone = copy_of(tmp_path / "clone")
    finished = load(clone)
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: torch_gdn: expected the extension in {clone / 'torch_gdn'}, like the sources")
    assert f"in {ROOT / 'torch_gdn'}. Build this copy in {clone}: pip install -e . --no-build-isolation" in last


@pytest.mark.sweep(4)
@pytest.mark.parametrize("path", ["itself", "a link to the folder", "a link to the extension", "a tree of links"])
def test_a_copys_own_extension_loads(path: str, tmp_path: Path) -> None:
    """The last one is what setuptools makes for an editable install in its strict mode."""
    clone = copy_of(tmp_path / "clone", links=path == "a tree of links")
    own = clone / "torch_gdn" / BUILT.name
    own.symlink_to(BUILT) if path == "a link to the extension" else shutil.copyfile(BUILT, own)
    if path == "a link to the folder":
        (tmp_path / "linked").symlink_to(clone)
        clone = tmp_path / "linked"
    finished = load(clone)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split()[1] == str(clone / "torch_gdn" / BUILT.name)


def test_an_extension_of_another_version_is_an_error(tmp_path: Path) -> None:
    clone = copy_of(tmp_path / "clone")
    shutil.copyfile(BUILT, clone / "torch_gdn" / BUILT.name)
    project = clone / "pyproject.toml"
    project.write_text(project.read_text().replace(f'version = "{torch_gdn.__version__}"', 'version = "9.9"', 1))
    finished = load(clone)
    assert finished.returncode == 1
    expected = f"expected an extension of version 9.9, as the sources in {clone / 'torch_gdn'}, got one of "
    assert expected + f"{torch_gdn.__version__}. Build it again in {clone}: pip install" in finished.stderr


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
