"""Tests what a tag releases: a wheel for each torch and Python, with different names. Nobody has run the workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from evidence.proof.mac import wheels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
MATRIX: dict[str, Any] = JOBS["wheel"]["strategy"]["matrix"]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_torches_are_those_that_the_mac_build_is_proven_with() -> None:
    assert MATRIX["torch"] == [wheels.TORCH_VERSION, *wheels.NEWER_TORCH_VERSIONS]


def test_they_are_of_every_minor_version_that_pyproject_accepts() -> None:
    (accepted,) = {SpecifierSet(result) for result in re.findall(r'"torch(>=[^"]*)"', PYPROJECT)}
    candidates = [f"2.{number}" for number in range(100)]
    assert [minor(each) for each in MATRIX["torch"]] == [each for each in candidates if f"{each}.0" in accepted]


def test_the_pythons_are_those_that_the_documentation_names() -> None:
    first, last = (int(x.split(".")[1]) for x in (MATRIX["python"][0], MATRIX["python"][-1]))
    assert MATRIX["python"] == [f"3.{number}" for number in range(first, last + 1)]
    for page in ("README.md", "docs/install.md"):
        assert f"Python 3.{first} to 3.{last}" in (ROOT / page).read_text().replace("![Python", "")  # of the badge
    assert f'requires-python = ">=3.{first}"' in PYPROJECT


def test_what_is_left_out_is_in_the_documentation() -> None:
    for combination in MATRIX["exclude"]:
        assert combination["torch"] in MATRIX["torch"] and combination["python"] in MATRIX["python"]
        words = f"torch {minor(combination['torch'])} for Python {combination['python']}"
        assert words in " ".join((ROOT / "docs/install.md").read_text().split())


def pinned(folder: Path, torch: str) -> subprocess.CompletedProcess[str]:
    (folder / "pyproject.toml").write_text(PYPROJECT)
    command = [sys.executable, str(ROOT / ".ci/pin_torch.py"), torch]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("torch", MATRIX["torch"])
def test_a_wheel_asks_for_its_torch_and_pypi_gets_the_newest(tmp_path: Path, torch: str) -> None:
    assert pinned(tmp_path, torch).returncode == 0
    before, after = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (ROOT, tmp_path))
    own = f"torch>={minor(torch)},<2.{int(minor(torch).split('.')[1]) + 1}"
    assert [x for x in after["project"]["dependencies"] if x.startswith("torch")] == [own]
    assert [x for x in after["build-system"]["requires"] if x.startswith("torch")] == [own]
    local = "" if torch == MATRIX["torch"][-1] else f"+torch{minor(torch)}"
    assert after["project"]["version"] == before["project"]["version"] + local
    for project in (before, after):
        del project["project"]["version"], project["project"]["dependencies"], project["build-system"]["requires"]
    assert before == after


@pytest.mark.parametrize("torch", ["2.12.1", "2.16.0", "3.14.0", "2.14"])
def test_another_torch_is_an_error(tmp_path: Path, torch: str) -> None:
    finished = pinned(tmp_path, torch)
    assert finished.returncode == 1
    assert f"expected torch 2.13 to 2.15, with its patch level, got {torch}" in finished.stderr
    assert (tmp_path / "pyproject.toml").read_text() == PYPROJECT


def command_of(job: str, name: str) -> str:
    (command,) = [step["run"] for step in JOBS[job]["steps"] if step.get("name") == name]
    assert isinstance(command, str)
    return command


def test_pypi_gets_no_local_version(tmp_path: Path) -> None:
    kept = ["torch_gdn-0.1.0.tar.gz", "torch_gdn-0.1.0-cp311-cp311-macosx_14_0_arm64.whl"]
    (tmp_path / "dist").mkdir()
    for name in (*kept, "torch_gdn-0.1.0+torch2.14-cp311-cp311-macosx_14_0_arm64.whl"):
        (tmp_path / "dist" / name).touch()
    subprocess.run(["bash", "-e", "-c", command_of("pypi", "PyPI takes no local versions")], cwd=tmp_path, check=True)
    assert sorted(x.name for x in (tmp_path / "dist").iterdir()) == sorted(kept)


@pytest.mark.parametrize(("tag", "status"), [("v0.1.0", 0), ("v0.1.1", 1)])
def test_a_tag_that_is_not_the_version_ends_the_release(tmp_path: Path, tag: str, status: int) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/torch_gdn-0.1.0.tar.gz").touch()
    command = command_of("sdist", "The tag is the version in pyproject.toml")
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    finished = subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, check=False)
    assert finished.returncode == status
    assert {"sdist", "wheel"} <= set(JOBS["assets"]["needs"]) and JOBS["pypi"]["needs"] == "assets"


def test_a_job_that_may_write_runs_nothing_of_the_projects() -> None:
    writing = {name: job for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()}
    assert set(writing) == {"assets", "pypi"}
    for job in writing.values():
        assert not any("checkout" in step.get("uses", "") for step in job["steps"])
        commands = [step["run"].split()[0] for step in job["steps"] if "run" in step]
        assert commands in (["gh"], ["rm"])
