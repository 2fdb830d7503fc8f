"""Tests that a Mac takes the wheel for macOS, and that it holds the package and nothing else, and says what it is."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from wheel.wheelfile import WheelFile

from evidence.proof.mac import build as mac_build
from evidence.proof.mac import wheel as mac_wheel
from evidence.proof.mac import wheels

pytestmark = pytest.mark.xdist_group("proof")


@pytest.fixture(scope="module")
def wheel(build: mac_build.Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mac_wheel.assemble(build, tmp_path_factory.mktemp("wheel"))


def test_wheel_is_right(wheel: Path, torch_wheel: wheels.Wheel) -> None:
    finding = mac_wheel.check_wheel(wheel, torch_wheel)
    assert finding.problems == []
    assert finding.cases > 80


def altered(wheel: Path, directory: Path, change: Callable[[Path], object]) -> Path:
    """Returns the wheel with changed files and a new RECORD."""
    tree = directory / "tree"
    with WheelFile(wheel) as archive:
        archive.extractall(tree)
    change(tree)
    path = directory / wheel.name
    with WheelFile(path, "w") as archive:
        archive.write_files(tree)
    return path


def replace_in(pattern: str, old: str, new: str) -> Callable[[Path], object]:
    def change(tree: Path) -> None:
        (path,) = tree.glob(pattern)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def add(name: str) -> Callable[[Path], object]:
    def change(tree: Path) -> None:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")

    return change


def test_tests_in_the_wheel_are_found(wheel: Path, tmp_path: Path) -> None:
    (problem,) = mac_wheel.check_contents(altered(wheel, tmp_path, add("tests/test_info.py"))).problems
    assert "'tests', 'torch_gdn'" in problem


def test_second_extension_module_is_found(wheel: Path, tmp_path: Path) -> None:
    (problem,) = mac_wheel.check_contents(altered(wheel, tmp_path, add("torch_gdn/_other.so"))).problems
    assert "_other.so" in problem


def test_missing_shader_is_found(wheel: Path, tmp_path: Path) -> None:
    path = altered(wheel, tmp_path, lambda tree: (tree / "torch_gdn/shaders/gdn/solve_tril.metal").unlink())
    assert mac_wheel.check_contents(path).problems == ["torch_gdn/shaders/gdn/solve_tril.metal is missing"]


def test_file_that_differs_from_record_is_found(wheel: Path, tmp_path: Path) -> None:
    path = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as original, zipfile.ZipFile(path, "w") as copy:
        for name in original.namelist():
            changed = b"\n" if name == "torch_gdn/_version.py" else b""
            copy.writestr(name, original.read(name) + changed)
    (problem,) = mac_wheel.check_contents(path).problems
    assert problem.startswith("RECORD")


def test_tag_that_is_not_in_the_name_is_found(wheel: Path, tmp_path: Path) -> None:
    path = altered(wheel, tmp_path, replace_in("*.dist-info/WHEEL", "macosx_14_0_arm64", "macosx_15_0_arm64"))
    (problem,) = mac_wheel.check_tags(path).problems
    assert "macosx_15_0_arm64" in problem


def test_name_that_no_mac_of_that_age_takes_is_found(wheel: Path, tmp_path: Path) -> None:
    path = altered(wheel, tmp_path, replace_in("*.dist-info/WHEEL", "macosx_14_0_arm64", "macosx_15_0_arm64"))
    later = path.rename(path.with_name(path.name.replace("macosx_14_0", "macosx_15_0")))
    (problem,) = mac_wheel.check_tags(later).problems
    assert "no Mac with macOS 14" in problem


def test_label_that_is_missing_is_found(wheel: Path, tmp_path: Path) -> None:
    path = altered(wheel, tmp_path, replace_in("*.dist-info/METADATA", f"[{mac_wheel.LABEL}] ", ""))
    (problem,) = mac_wheel.check_label(path).problems
    assert "summary" in problem


def test_torch_that_is_not_the_one_linked_against_is_found(
    wheel: Path, tmp_path: Path, torch_wheel: wheels.Wheel
) -> None:
    path = altered(
        wheel, tmp_path, replace_in("*.dist-info/METADATA", "Requires-Dist: torch<", "Requires-Dist: torch>99,<")
    )
    (problem,) = mac_wheel.check_requirement(path, torch_wheel).problems
    assert torch_wheel.version in problem


def test_module_that_finds_no_torch_is_found(wheel: Path, tmp_path: Path, torch_wheel: wheels.Wheel) -> None:
    """With torch_gdn's module one folder deeper, `@loader_path/..` is torch_gdn instead of site-packages."""
    libraries = tmp_path / "torch_gdn.whl"
    shutil.copy(wheel, libraries)
    elsewhere = wheels.Wheel("torch", torch_wheel.version, libraries, torch_wheel.root)  # this "torch" has no torch/lib
    problems = mac_wheel.check_against_torch(wheel, elsewhere).problems
    assert len(problems) == 4
    assert all("not where the rpath leads" in problem for problem in problems)
