"""The wheel holds torch_gdn with its shaders and nothing else; the README's commands exist."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("packaging")  # one process: the wheel is built once


def setup(*arguments: str) -> None:
    """Runs setup.py; its objects are shared with the development install, so only what changed is compiled."""
    finished = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    egg_info = ("egg_info", "--egg-base", str(folder))  # else two runs at once write one torch_gdn.egg-info
    setup(*egg_info, "build", "--build-lib", str(folder / "lib"), "bdist_wheel", "--bdist-dir", str(folder / "tree"),
          "--dist-dir", str(folder))  # fmt: skip
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def files_below(folder: Path) -> set[str]:
    visible = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)) for path in visible}


def test_wheel_installs_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"torch_gdn"}


def test_wheel_holds_every_shader(wheel: zipfile.ZipFile) -> None:
    prefix = "torch_gdn/shaders/"
    packed = {name.removeprefix(prefix): wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)}
    shaders = ROOT / "shaders"
    assert packed == {name: (shaders / name).read_bytes() for name in files_below(shaders)}
    assert any(name.endswith(".metal") for name in packed)


def test_wheel_holds_every_module_and_the_extension(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    assert packed == {f"torch_gdn/{name}" for name in files_below(ROOT / "torch_gdn") if name.endswith(".py")}
    (extension,) = (name for name in wheel.namelist() if name.endswith(".so"))
    assert extension.startswith("torch_gdn/_C.")


def test_wheel_is_typed(wheel: zipfile.ZipFile) -> None:
    assert {"torch_gdn/py.typed", "torch_gdn/_C.pyi"} <= set(wheel.namelist())


def test_wheel_holds_the_codebooks(wheel: zipfile.ZipFile) -> None:
    for name in ("codebooks.json", "origin_codebooks.json"):
        packed = wheel.read(f"torch_gdn/aura/{name}")
        assert packed == (ROOT / "torch_gdn" / "aura" / name).read_bytes()


def test_wheel_holds_what_makes_a_folder_a_local_kernel(wheel: zipfile.ZipFile) -> None:
    name = "torch_gdn/integrations/transformers/kernels/metadata.json"
    assert wheel.read(name) == (ROOT / name).read_bytes()


def test_wheel_is_apache_licensed(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    for file in ("LICENSE", "NOTICE"):
        (name,) = (name for name in wheel.namelist() if name.endswith(f"/licenses/{file}"))
        assert wheel.read(name) == (ROOT / file).read_bytes()


def test_wheel_states_the_torch_and_python_that_it_accepts(metadata: Message) -> None:
    assert "torch<2.16,>=2.13" in metadata.get_all("Requires-Dist", [])
    assert metadata["Requires-Python"] == ">=3.10"


def test_installed_wheel_finds_its_own_shaders(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = "import torch_gdn; print(torch_gdn.__file__); print(torch_gdn._C.shader_directory())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    module, shaders = (Path(line) for line in finished.stdout.split("\n")[:2])
    assert module == tmp_path / "torch_gdn" / "__init__.py"
    assert shaders.resolve() == (tmp_path / "torch_gdn" / "shaders").resolve()


CHECK = """
import json, sys, torch
from torch_gdn.check import __main__, golden, plan
from torch_gdn.check.steps import execute
status = __main__.main(["--quick", "--json", "report.json"])
seeded = [step for step in plan.steps(golden.FOLDER, quick=True) if step.section == "seeded"]
results = {step.name: execute(step, torch.device("cpu")) for step in seeded}
problems = {name: result.message for name, result in results.items() if result.status != "pass"}
json.dump({"status": status, "checked": len(results), "problems": problems}, open("own.json", "w"))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a device, and the whole check takes it minutes")
def test_installed_wheel_checks_itself(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Without a checkout: what is missing is a line of the report, and every comparison with float64 can be made."""
    wheel.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["status"] == 1 and own["problems"] == {} and own["checked"] > 10
    assert "no mps device is available" in finished.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {row["section"]: row["status"] for row in rows} == {
        "facts": "FAIL",  # there is no device
        **dict.fromkeys(("use", "compile", "recorded", "seeded", "timing", "inductor"), "left out"),
    }


# What setuptools asks, with the platform set to macOS: flags of the compiler, and the platform in the wheel's name.
UNIVERSAL_PYTHON = """
import _osx_support, sys, sysconfig
from distutils.core import run_setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

system, sys.platform = sys.platform, "darwin"
run_setup("setup.py", stop_after="init")
flags = _osx_support._override_all_archs({"CFLAGS": "-arch arm64 -arch x86_64 -g"})["CFLAGS"].split()
print([b for a, b in zip(flags, flags[1:]) if a == "-arch"], sysconfig.get_platform())
sys.platform = system
"""


def test_python_for_both_kinds_of_mac_builds_for_one() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", UNIVERSAL_PYTHON], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert finished.stdout.splitlines()[-1:] == ["['arm64'] macosx-14.0-arm64"], finished.stderr


def test_source_distribution_holds_every_file_git_does(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout (a source distribution, say): nothing to compare with")
    setup("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    ours = {name for name in listed.stdout.split("\n") if (ROOT / name).is_file() and name != ".gitignore"}
    assert ours - packed == set()


def test_commands_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    mentioned = set(re.findall(r"(?:^    |`)make ([a-z]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= mentioned
    assert mentioned <= targets


def test_modules_and_files_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    for module in re.findall(r"python -m (torch_gdn[a-z_.]*)", readme):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for file in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / file).exists(), file
