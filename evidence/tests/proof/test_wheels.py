"""Tests that wheels come from the cache or from pip, and that a missing one has a reason."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from evidence.proof.mac import wheels
from evidence.proof.reasons import Unavailable

pytestmark = pytest.mark.xdist_group("proof")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_GDN_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def small_wheel(directory: Path, name: str) -> Path:
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch/include/c10/macros.h", "// a header\n")
        archive.writestr("torch/share/large.bin", "left packed")
        archive.writestr("torch-9.9.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return path


def forbid_pip(*arguments: object, **options: object) -> None:
    raise AssertionError("pip was called")


def test_wheel_in_the_cache_is_not_downloaded_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small_wheel(cache, f"torch-9.9.0-{wheels.PYTHON_TAG}-none-macosx_11_0_arm64.whl")
    monkeypatch.setattr(subprocess, "run", forbid_pip)
    assert wheels.fetch("torch", "9.9.0").file == file


def test_only_what_checks_read_is_unpacked(cache: Path) -> None:
    small_wheel(cache, f"torch-9.9.0-{wheels.PYTHON_TAG}-{wheels.PYTHON_TAG}-{wheels.PLATFORM}.whl")
    wheel = wheels.fetch("torch", "9.9.0")
    unpacked = {path.relative_to(wheel.root).as_posix() for path in wheel.root.rglob("*") if path.is_file()}
    assert unpacked == {"torch/include/c10/macros.h", "torch-9.9.0.dist-info/WHEEL"}
    assert "torch/share/large.bin" in wheel.names()


def test_wheel_for_another_python_is_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_wheel(cache, "torch-9.9.0-cp27-cp27m-macosx_14_0_arm64.whl")
    monkeypatch.setattr(subprocess, "run", lambda *a, **o: subprocess.CompletedProcess(a, 1, "", "no such version"))
    with pytest.raises(Unavailable, match=r"no wheel of torch 9\.9\.0 .*: no such version"):
        wheels.fetch("torch", "9.9.0")


def test_full_disk_is_said_before_anything_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1 << 20))
    monkeypatch.setattr(subprocess, "run", forbid_pip)
    with pytest.raises(Unavailable, match="1 MB free"):
        wheels.fetch("torch", "9.9.0")


def test_pip_alone_chooses_where_wheels_come_from(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "refused")

    monkeypatch.setattr(subprocess, "run", record)
    with pytest.raises(Unavailable):
        wheels.fetch("torch", "9.9.0")
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert not [word for word in command if "index" in word or "://" in word]
