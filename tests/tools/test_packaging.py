"""Tests that the wheel holds torch_gdn with its shaders and nothing else."""

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.xdist_group("packaging"),  # one process, which builds the wheel once
    pytest.mark.sweep(1, seeds=4),
]


AS_PIP = "import runpy, sys, setuptools.build_meta; sys.argv[0] = 'setup.py'; "
AS_PIP += "runpy.run_path('setup.py', run_name='__main__')"


def setup(*arguments: str) -> None:
    """Runs setup.py as pip does. It shares objects with the development install, so only what changed is compiled."""
    command = [sys.executable, "-c", AS_PIP, "--quiet", *arguments]
    finished = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what pip is told of a checkout, in a folder for wheels."""
    folder = tmp_path_factory.mktemp("wheel")  # otherwise two runs write one torch_gdn.egg-info
    setup("egg_info", "--egg-base", str(folder), "dist_info", "--output-dir", str(folder))
    (result,) = folder.glob("*.dist-info")
    return result


@pytest.fixture(scope="module")
def wheel(described: Path) -> zipfile.ZipFile:
    """Returns the wheel, to which pip hands the description of the checkout."""
    folder = described.parent
    places = ("--bdist-dir", str(folder / "tree"), "--dist-dir", str(folder), "--dist-info-dir", str(described))
    built = ("build", "--build-lib", str(folder / "lib"), "bdist_wheel", *places)
    setup("egg_info", "--egg-base", str(folder), *built)
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


def test_wheel_is_apache_licensed(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    for file in ("LICENSE", "NOTICE"):
        (name,) = (name for name in wheel.namelist() if name.endswith(f"/licenses/{file}"))
        assert wheel.read(name) == (ROOT / file).read_bytes()


def test_the_long_description_has_no_dead_links(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "torch_gdn.enable()" in description and "](https://" in description
    assert re.findall(r"\]\((?!https:)[^)]*\)", description) == []


def test_wheel_states_the_torch_and_python_that_it_accepts(metadata: Message) -> None:
    assert "torch<2.16,>=2.13" in metadata.get_all("Requires-Dist", [])
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_extra_has_what_the_program_of_the_readme_needs(metadata: Message) -> None:
    extra = [line for line in metadata.get_all("Requires-Dist", []) if 'extra == "transformers"' in line]
    assert {re.match(r"\w+", line)[0] for line in extra} == {"transformers", "accelerate"}  # type: ignore[index]


PLACES = "import torch_gdn; print(torch_gdn.__file__); print(torch_gdn._C.shader_directory())"


def test_installed_wheel_finds_its_own_shaders_and_a_checkout_says_why_it_does_not_load(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """In a checkout that was not built, Python finds its sources before the installed wheel."""
    installed, checkout = tmp_path / "installed", tmp_path / "checkout"
    wheel.extractall(installed)
    shutil.copytree(ROOT / "torch_gdn", checkout / "torch_gdn", ignore=shutil.ignore_patterns("_C.*.so", "__pycache__"))
    # -S leaves out the finder of an editable install, which would find the extension for the checkout's sources.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(Path(torch.__file__).parents[1])])}

    def start(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", PLACES]
        return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)

    elsewhere, in_checkout = start(tmp_path), start(checkout)
    assert elsewhere.returncode == 0, elsewhere.stderr
    module, shaders = (Path(line) for line in elsewhere.stdout.split("\n")[:2])
    assert module == installed / "torch_gdn" / "__init__.py"
    assert shaders.resolve() == (installed / "torch_gdn" / "shaders").resolve()
    last = in_checkout.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: torch_gdn: {checkout / 'torch_gdn'} has no extension"), in_checkout.stderr
    assert "pip install -e . --no-build-isolation" in last and "start Python in another folder" in last


CHECK = """
import json, sys, torch
from torch_gdn_check import __main__, golden, plan
from torch_gdn_check.steps import execute
status = __main__.main(["--quick", "--json", "report.json"])
seeded = [step for step in plan.steps(golden.FOLDER, quick=True) if step.section == "seeded"]
results = {step.name: execute(step, torch.device("cpu")) for step in seeded}
problems = {name: result.message for name, result in results.items() if result.status != "pass"}
json.dump({"status": status, "checked": len(results), "problems": problems}, open("own.json", "w"))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a device, and the whole check takes it minutes")
def test_installed_wheel_checks_itself(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Without a checkout, no text mentions the simulated device, and the comparisons with float64 run."""
    wheel.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["status"] == 1 and own["problems"] == {} and own["checked"] > 10
    assert finished.stdout.startswith("FAIL: this PyTorch has no mps device")
    assert "simulator" not in finished.stdout + finished.stderr


# With the platform set to macOS, setuptools asks for the compiler's flags and the platform in the wheel's name.
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


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_setup_py(monkeypatch)


def load_setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns setup.py as a module, which builds nothing. The environment variables that it changes are restored."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cores", "memory", "limit", "jobs"),
    [
        (12, 64 << 30, None, 12),
        (8, 8 << 30, None, 4),  # 2 GB per job
        (8, 1 << 30, None, 1),
        (16, 64 << 30, str(4 << 30), 2),  # a container's limit
        (16, 64 << 30, "max", 16),
    ],
)
def test_a_build_has_as_many_jobs_as_cores_and_memory_allow(
    cores: int, memory: int, limit: str | None, jobs: int, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(setup_py, "MEMORY_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert setup_py.jobs() == jobs


def test_each_source_is_compiled_once_in_a_unit_of_its_folder(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.cpp"))]
    compiled = setup_py.units(files, tmp_path / "units", '#include "first.h"\n')
    alone = {file for file in compiled if not file.startswith("units/")}
    assert {Path(file).parent.name for file in alone} == {"simd"}
    members = []
    for unit in compiled:
        if unit not in alone:
            first, *lines = (tmp_path / unit).read_text().splitlines()
            assert first == '#include "first.h"'
            members.append([re.findall(r'#include "(.*)"', line)[0] for line in lines])
    assert sorted([*alone, *(file for unit in members for file in unit)]) == files
    folders = [{Path(file).parent for file in unit} for unit in members]
    assert all(len(folder) == 1 for folder in folders) and len(set.union(*folders)) == len(folders)
    before = {unit: (tmp_path / unit).stat().st_mtime_ns for unit in compiled if unit not in alone}
    setup_py.units(files, tmp_path / "units", '#include "first.h"\n')
    assert before == {unit: (tmp_path / unit).stat().st_mtime_ns for unit in before}


def test_a_change_of_any_source_or_header_starts_a_build(setup_py: ModuleType) -> None:
    extension = setup_py.extension()
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*") if "metal" not in path.parts}
    watched = {os.path.relpath(path, ROOT) for path in extension.depends}
    assert files <= watched and set(extension.sources) <= files


def test_a_build_without_a_compiler_says_what_to_install(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CXX", "no-such-compiler --flag")
    with pytest.raises(SystemExit, match=r"No such file or directory: 'no-such-compiler'.*xcode-select --install"):
        setup_py.BuildIncrementally(setuptools.Distribution()).build_extensions()


def test_a_build_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    with pytest.raises(SystemExit, match=r"Install that first:\n    pip install torch==2\.13\.0 numpy"):
        load_setup_py(monkeypatch)


def test_a_build_with_an_old_python_says_which_it_needs() -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setitem(sys.modules, "torch.utils.cpp_extension", None)  # such a Python has no torch to build with
        patched.setattr(sys, "version_info", (3, 9, 18, "final", 0))
        load_setup_py(patched)
    assert str(ended.value) == "torch_gdn needs Python 3.10 or later; this is Python 3.9.18"


def test_the_paths_of_the_extension_are_relative(setup_py: ModuleType) -> None:
    """setuptools prints a warning for each one that is not."""
    extension = setup_py.extension()
    files = [Path(name) for name in (*extension.sources, *extension.depends)]
    assert len(files) > 200 and all((ROOT / file).is_file() and not file.is_absolute() for file in files)
    assert Path("shaders/core/parameters.h") in files


def test_a_build_shows_one_file_a_line(setup_py: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    failed = f"FAILED: [code=1] bindings.o\nc++ {'-I/folder ' * 70} -c {ROOT}/csrc/bindings.cpp -o bindings.o\n"
    with setup_py.short_progress():
        command = f"c++ -MMD -MF x.o.d {'-I/folder ' * 70} -c {ROOT}/csrc/cpu/x.cpp -o /objects/x.o -std=c++20"
        subprocess.run(["printf", "%s", f"[13/66] {command}\nx.cpp: warning: text\n{failed}"], check=True)
    print("after", flush=True)
    assert capfd.readouterr().out == f"[13/66] csrc/cpu/x.cpp\nx.cpp: warning: text\n{failed}after\n"


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


def test_the_citation_has_the_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_checkout_names_the_folders_of_its_neighbours_and_a_wheel_their_versions(
    metadata: Message, described: Path
) -> None:
    """pip asks the checkout for its metadata, and then installs what they name."""
    checkout = email.message_from_string((described / "METADATA").read_text())
    for extra, package, folder in (("check", "torch_gdn_check", "check"), ("engines", "torch_gdn_engines", "engines")):
        (from_checkout,), (from_wheel,) = (
            [line for line in result.get_all("Requires-Dist", []) if line.endswith(f'extra == "{extra}"')]
            for result in (checkout, metadata)
        )
        assert from_checkout.startswith(f"{package} @ {(ROOT / folder).as_uri()} ;")
        assert from_wheel.startswith(f"{package}<0.2,>=0.1;")
