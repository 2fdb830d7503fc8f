"""Tests what the Makefile's commands would install, and the errors of .ci/system-packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
PROGRAMS = ("bash", "dirname", "env", "id", "uname")  # what .ci/system-packages starts


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_shows_each_target_with_its_whole_text() -> None:
    targets = re.findall(r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    printed = [line.split(maxsplit=1) for line in make("help").splitlines()]
    assert len(targets) > 10 and [list(target) for target in targets] == printed[: len(targets)]
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    assert index in make("help") and index in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", ["examples"]),
        ("lint", ["examples", "dev"]),
        ("quick", ["examples", "dev"]),
        ("test-vllm", ["examples", "test-vllm"]),
        ("test-sglang", ["examples"]),
    ],
)
def test_a_fresh_clone_installs_what_the_target_needs(target: str, extras: list[str], tmp_path: Path) -> None:
    environments = (f"VENV={tmp_path / 'venv'}", f"VLLM_VENV={tmp_path / 'vllm'}", f"SGLANG_VENV={tmp_path / 's'}")
    commands = make("--dry-run", *environments, target)
    assert re.findall(r"'\.(?:/engines)?\[([\w-]+)\]'", commands) == extras
    assert commands.index("setup.py --quiet build_ext") < commands.index("'.[examples]'")  # pip would show no progress
    torch = [line for line in commands.splitlines() if "pip install" in line and "torch==" in line]
    assert torch and not any("index" in line for line in torch)
    commands = make("--dry-run", *environments, "TORCH_INDEX=https://index", target)
    assert commands.count("--index-url https://index 'torch==") == len(torch)


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_an_engine_links_to_the_torch_that_is_there(target: str, tmp_path: Path) -> None:
    """Otherwise its environment would unpack another, and build the simulated device against that one."""
    torch = tmp_path / "venv/lib/python3/site-packages"
    for name in ("torch", "torchgen", "functorch", "torch-2.13.0+cpu.dist-info", "torch_gdn-0.1.0.dist-info"):
        (torch / name).mkdir(parents=True)
    linked = tmp_path / target / "lib/python3/site-packages"
    linked.mkdir(parents=True)
    places = [f"VENV={tmp_path / 'venv'}", f"{target.upper()}_VENV={tmp_path / target}"]
    commands = [line.strip() for line in make("--dry-run", *places, f"test-{target}").splitlines()]
    (link,) = [line for line in commands if line.startswith("ln ")]
    assert commands.index(link) < next(
        i for i, line in enumerate(commands) if f"{tmp_path / target}/bin/python" in line
    )
    subprocess.run(["bash", "-c", link], check=True)
    assert {path.name for path in linked.iterdir()} == {path.name for path in torch.iterdir()} - {
        "torch_gdn-0.1.0.dist-info"
    }
    assert all(path.resolve().parent == torch for path in linked.iterdir())


def test_the_proof_runs_the_engines_tests_whole() -> None:
    commands = make("--dry-run", "proof").splitlines()
    (line,) = [line for line in commands if line.endswith(" test-vllm test-sglang")]
    assert line.startswith("TORCH_GDN_SWEEPS=all ")


def system_packages(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Runs .ci/system-packages on a system that has Python and these programs, but no compiler."""
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "python3").symlink_to(sys.executable)
    for name, script in programs.items():
        file = folder / name.replace("_", "-")
        file.write_text(f"#!{shutil.which('sh')}\n{script}\n")
        file.chmod(0o755)
    environment = {"PATH": str(folder), "HOME": os.environ["HOME"]}
    command = [str(ROOT / ".ci" / "system-packages")]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac needs none of these packages")
@pytest.mark.parametrize(
    ("manager", "words"),
    [
        ("dnf", "dnf install gcc-c++ clang libblocksruntime-devel boost-devel"),
        ("pacman", "pacman -S gcc clang libdispatch boost"),
        ("zypper", "apt-get install g++ clang-19 libblocksruntime-dev libboost-context-dev"),
    ],
)
def test_elsewhere_than_on_debian_a_line_says_what_to_install(manager: str, words: str, tmp_path: Path) -> None:
    finished = system_packages(tmp_path, **{manager: "exit 1"})
    assert finished.returncode == 1
    assert finished.stderr.strip().endswith(words), finished.stderr


@pytest.mark.skipif(sys.platform == "darwin" or os.geteuid() != 0, reason="needs apt, and root without a password")
def test_apt_is_announced_before_it_runs(tmp_path: Path) -> None:
    finished = system_packages(tmp_path, apt_get='echo "apt-get was called with $*" >&2')
    announced, updated, installed, *_ = finished.stderr.splitlines()
    assert announced.startswith("Now running: apt-get install g++ clang-19 libblocksruntime-dev"), finished.stderr
    assert updated == "apt-get was called with update -qq"
    assert installed.startswith("apt-get was called with install ") and installed.endswith(
        announced.removeprefix("Now running: apt-get install")
    )
