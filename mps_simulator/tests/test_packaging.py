"""Tests the distribution: the wheel has the device's sources, and neither it nor its tests need a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
NOT_OURS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
FIND_SOURCES = """
import subprocess
from pathlib import Path
from mps_simulator import build

sources = build.device_sources()
(stream,) = (path for path in sources if path.name == "stream.mm")  # includes headers of every folder
command = build.Toolchain.make().command(stream, Path("stream.i"), build.DEVICE_FLAGS)
subprocess.run([*command, "-E"], check=True)  # preprocesses only: the whole build takes minutes
print(build.SIMULATOR, len(sources))
"""


def python(*arguments: str, directory: Path, path: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *arguments]
    finished = subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_an_installed_wheel_finds_its_sources_from_an_empty_folder(tmp_path: Path) -> None:
    for module in ("setuptools", "wheel"):
        pytest.importorskip(module)
    source, target, empty = (tmp_path / name for name in ("source", "target", "empty"))
    shutil.copytree(FOLDER, source, ignore=NOT_OURS)
    empty.mkdir()
    arguments = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(target))
    python("-m", "pip", "install", *arguments, str(source), directory=empty)
    package = target / "mps_simulator"
    assert files_below(package) == files_below(FOLDER / "src" / "mps_simulator")
    assert len(list(target.glob("*.dist-info/licenses/LICENSE"))) == 1
    result, count = python("-c", FIND_SOURCES, directory=empty, path=str(target)).split()
    assert Path(result) == package and int(count) == sum(
        path.suffix in (".c", ".cpp", ".mm") for path in files_below(package)
    )


def test_the_tests_import_nothing_but_the_package(tmp_path: Path) -> None:
    """The tests of a project around this folder cannot be imported from elsewhere."""
    command = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent))
    python(*command, directory=tmp_path)


def test_nothing_names_a_project_that_runs_on_it(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "copy", ignore=NOT_OURS)
    files = files_below(tmp_path / "copy")
    assert len(files) > 150
    name = "g" + "dn"
    assert [
        path for path in files if name.encode() in (FOLDER / path).read_bytes().lower() or name in path.name.lower()
    ] == []
