"""Tests mps_simulator.load() with other people's .mm and .cpp files, unchanged."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mps_simulator
from mps_simulator import build, loading, project

OWN_OP = Path(__file__).parent / "own_op" / "reversed.mm"
MODULE = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("answer", [] { return ANSWER; }); }
"""


def python(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs a separate process in this directory, because a process loads a library only once."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=directory)


# ---- an op as on a Mac ----


@pytest.fixture(scope="module")
def library() -> Path:
    return mps_simulator.load(OWN_OP)


@pytest.mark.usefixtures("library")
def test_an_op_runs_as_it_is() -> None:
    x = torch.arange(100.0)
    with mps_simulator.profile() as profile:
        y = torch.ops.own_op.reversed(x.to("mps")[20:])
    assert torch.equal(y.cpu(), x[20:].flip(0))
    assert profile.launched("reversed") == 1


@pytest.mark.usefixtures("library")
def test_the_watch_finds_a_planted_read_out_of_bounds() -> None:
    torch.ops.own_op.reversed_wrong(torch.ones(100, device="mps"))
    words = r"'reversed_wrong': out of bounds read of 4 bytes at argument 'x'.*, element 100 .*; thread \(0, 0, 0\)"
    with pytest.raises(mps_simulator.Fault, match=words):
        torch.mps.synchronize()


@pytest.mark.usefixtures("library")
def test_an_error_of_the_op_is_an_exception() -> None:
    with pytest.raises(RuntimeError, match="expected a contiguous float32 tensor"):
        torch.ops.own_op.reversed(torch.ones(4, dtype=torch.int32, device="mps"))


def test_the_watch_finds_it_in_a_shader_compiled_from_python() -> None:
    shaders = torch.mps.compile_shader("""
        kernel void shift(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i + 1] = 1; }
    """)
    shaders.shift(torch.empty(6, device="mps"))
    with pytest.raises(mps_simulator.Fault, match="kernel 'shift'"):
        torch.mps.synchronize()


# ---- building ----


def test_nothing_is_rebuilt_that_did_not_change(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], directory: Path) -> None:
        raise AssertionError(f"rebuilt: {command}")

    monkeypatch.setattr(build, "_run", refuse)
    assert mps_simulator.load([str(OWN_OP)]) == library


def test_a_changed_source_is_rebuilt(tmp_path: Path) -> None:
    source, header = tmp_path / "changed.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    header.write_text("#define ANSWER 1\n")
    first = mps_simulator.load(source, name="changed").stat()
    header.write_text("#define ANSWER 2\n")
    assert mps_simulator.load(source, name="changed").stat().st_mtime_ns > first.st_mtime_ns


@pytest.mark.parametrize("seconds", [-1000, 1000])
def test_headers_of_torch_that_were_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """A new installation changes their times, and clang refuses a precompiled header whose files have another time."""
    header = tmp_path / "system" / "torch_header.h"
    header.parent.mkdir()
    header.write_text("#pragma once\ninline int two() { return 2; }\n")
    monkeypatch.setattr(build, "SHARED_HEADERS", "#include <torch_header.h>\n")
    sources = [tmp_path / f"unit_{number}.cpp" for number in range(build.MANY)]
    for source in sources:
        source.write_text(f'#include <torch_header.h>\nextern "C" int {source.stem}() {{ return two(); }}\n')
    flags = ["-isystem", str(header.parent)]
    mps_simulator.load(sources, name="shares", flags=flags)
    changed = header.stat().st_mtime + seconds
    os.utime(header, (changed, changed))
    sources[0].touch()
    mps_simulator.load(sources, name="shares", flags=flags)


class Commands(list[str]):
    """The compiler's commands."""

    def count_of(self, name: str) -> int:
        """Counts the files compiled by commands with this name, and forgets all commands."""
        result = sum(" -c " in command and name in command for command in self)
        self.clear()
        return result


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Records commands, with a folder of kept objects that earlier runs of the tests did not fill."""
    result, run = Commands(), build._run
    monkeypatch.setattr(build, "objects_directory", lambda: tmp_path / "objects")
    monkeypatch.setattr(build, "_run", lambda command, at: (result.append(" ".join(command)), run(command, at))[1])
    return result


def test_a_moved_project_compiles_what_changed(tmp_path: Path, commands: Commands) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "headers").mkdir(parents=True)
    (first / "pyproject.toml").write_text("")
    (first / "headers" / "number.h").write_text("enum { kNumber = 1 };\n")
    (first / "one.cpp").write_text('#include <number.h>\nextern "C" int one() { return kNumber; }\n')
    (first / "two.cpp").write_text('#ifndef TWO\n#define TWO 2\n#endif\nextern "C" int two() { return TWO; }\n')

    def loaded(folder: Path, *flags: str) -> tuple[int, int, int]:
        """Returns the numbers of the library, and how many sources were compiled."""
        sources = [folder / "one.cpp", folder / "two.cpp"]
        path = mps_simulator.load(sources, name="moved", include=[folder / "headers"], flags=flags)
        copy = shutil.copy(path, tmp_path / f"{len(list(tmp_path.iterdir()))}.so")  # a path is loaded once
        library = ctypes.CDLL(str(copy))
        return library.one(), library.two(), commands.count_of(f" {folder}")

    assert loaded(first) == (1, 2, 2)
    shutil.copytree(first, second)
    assert loaded(second) == (1, 2, 0)
    (second / "headers" / "number.h").write_text("enum { kNumber = 3 };\n")
    assert loaded(second) == (3, 2, 1)
    assert loaded(second, "-DTWO=4") == (3, 4, 2)
    (second / "headers" / "number.h").write_text("enum { kNumber = 1 };\n")
    assert loaded(second) == (1, 2, 0)


def test_a_new_source_leaves_the_other_objects(tmp_path: Path, commands: Commands) -> None:
    old, new = tmp_path / "old.cpp", tmp_path / "new.cpp"
    for source in (old, new):
        source.write_text(f'extern "C" int {source.stem}_number() {{ return 1; }}\n')
    first = mps_simulator.load(old, name="grows")
    commands.clear()
    both = mps_simulator.load([old, new], name="grows")
    assert first.exists() and both != first
    assert [str(new) in command for command in commands if " -c " in command] == [True]


def test_sources_of_a_folder_compile_as_one_unit(tmp_path: Path, commands: Commands) -> None:
    sources = [tmp_path / folder / f"{folder}_{name}.cpp" for folder in ("a", "b") for name in ("one", "two")]
    for source in sources:
        source.parent.mkdir(exist_ok=True)
        source.write_text(f'extern "C" int {source.stem}() {{ return 1; }}\n')
    commands.clear()

    def compiled() -> int:
        library = ctypes.CDLL(str(mps_simulator.load(sources, name="united", units=sources)))
        assert all(getattr(library, source.stem)() == 1 for source in sources)
        return commands.count_of("units")

    assert compiled() == 2
    assert compiled() == 0
    sources[3].write_text(sources[3].read_text() + "// changed\n")
    assert compiled() == 1
    sources[3].write_text("int broken(\n")
    with pytest.raises(build.BuildError, match=rf"{sources[3]}:1:\d+: error"):
        compiled()


def test_a_python_module_can_be_imported(tmp_path: Path) -> None:
    source = tmp_path / "module.cpp"
    source.write_text(MODULE)
    try:
        mps_simulator.load(source, name="a_package._answer", flags=["-DANSWER=42"])
        assert importlib.import_module("a_package._answer").answer() == 42
    finally:
        sys.modules.pop("a_package._answer", None)


def test_headers_and_libraries(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "one.h").write_text('extern "C" int one();\n')
    (tmp_path / "two.cpp").write_text(
        "#include <one.h>\n#include <cstdlib>\nint two = one() == 1 ? 2 : (abort(), 0);\n"
    )
    one = mps_simulator.load(tmp_path / "one.cpp")
    mps_simulator.load([tmp_path / "two.cpp"], include=[tmp_path / "headers"], libraries=[one])


def test_a_compile_error_gives_the_compilers_message(tmp_path: Path) -> None:
    source = tmp_path / "wrong.mm"
    source.write_text("#import <Metal/Metal.h>\nvoid f(id<MTLDevice> d) { [d newBufferOfSize:4]; }\n")
    with pytest.raises(mps_simulator.BuildError, match="newBufferOfSize:"):
        mps_simulator.load(source)


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one source, got none"):
        mps_simulator.load([])
    with pytest.raises(ValueError, match=r"expected \.mm or \.cpp files, got .*kernel\.metal"):
        mps_simulator.load("kernel.metal")
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.mm"):
        mps_simulator.load(tmp_path / "absent.mm")


def test_before_activation(tmp_path: Path) -> None:
    result = python("-c", "import mps_simulator; mps_simulator.load('op.mm')", directory=tmp_path)
    assert "the simulated device is not active: call mps_simulator.activate() first" in result.stderr


# ---- what a project's pyproject.toml names ----


def write(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_activate_loads_what_the_project_of_the_working_directory_names(tmp_path: Path) -> None:
    (tmp_path / "op.mm").write_text(OWN_OP.read_text())
    (tmp_path / "tests").mkdir()
    write(tmp_path, '[[tool.mps_simulator.load]]\nname = "a_project"\nsources = ["*.mm"]\n')
    script = tmp_path / "tests" / "script.py"
    script.write_text("import torch\nprint(torch.ops.own_op.reversed(torch.arange(3.0, device='mps')).tolist())\n")
    result = python("-m", "mps_simulator", str(script), directory=tmp_path / "tests")
    assert result.stdout == "[2.0, 1.0, 0.0]\n", result.stderr


def test_the_nearest_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert project.find_project() is None
    outer = write(tmp_path, "[tool.mps_simulator]\n")
    write(inner, "[tool.other]\n")  # has no table of the simulator
    assert project.find_project() == outer and project.read_project(outer) == []


def test_an_entry(tmp_path: Path) -> None:
    (tmp_path / "csrc" / "metal").mkdir(parents=True)
    for name in ("csrc/a.cpp", "csrc/b.cpp", "csrc/metal/c.mm", "csrc/d.cpp"):
        (tmp_path / name).touch()
    path = write(
        tmp_path,
        '[[tool.mps_simulator.load]]\nname = "x"\nsources = ["csrc/**/*.cpp", "csrc/**/*.mm"]\n'
        'exclude = ["csrc/b.cpp"]\nunits = ["csrc/[ab].cpp"]\ninclude = ["csrc"]\n'
        'extensions = ["p._C"]\nflags = ["-DA"]\n',
    )
    sources = [tmp_path / name for name in ("csrc/a.cpp", "csrc/d.cpp", "csrc/metal/c.mm")]
    assert project.read_project(path) == [
        project.Entry("x", sources, sources[:1], [tmp_path / "csrc"], ["p._C"], ["-DA"])
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[tool.mps_simulator]\nload = 3", r"expected \[\[tool\.mps_simulator\.load\]\], got 3"),
        ("[[tool.mps_simulator.load]]\nsources = []", "expected tables with a name"),
        ('[[tool.mps_simulator.load]]\nname = "x"', "'x': expected sources, got none"),
        (
            '[[tool.mps_simulator.load]]\nname = "x"\nsources = "a.mm"',
            "'x': sources: expected a list of strings, got 'a.mm'",
        ),
        ('[[tool.mps_simulator.load]]\nname = "x"\nsources = ["*.mm"]', r"'x': no file matches '\*\.mm'"),
        ('[[tool.mps_simulator.load]]\nname = "x"\nsource = []', "expected the keys name, sources, .*, got 'source'"),
        ("[tool.mps_simulator", "pyproject.toml: "),
    ],
)
def test_a_wrong_table_is_explained(table: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, table)
    with pytest.raises(project.ProjectError, match=message):
        project.read_project(path)


def test_an_entry_whose_extension_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "unbuilt"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('not to be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        project.Entry("x", [OWN_OP], [], [], [name], [])
        for name in ("no_such_package._C", "unbuilt._C", "json.no_module.x")
    ]
    monkeypatch.setattr(loading, "find_project", lambda: tmp_path / "pyproject.toml")
    monkeypatch.setattr(loading, "read_project", lambda _: entries)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    told: list[str] = []
    monkeypatch.setattr(loading, "device_module", lambda: SimpleNamespace(say_what_is_loaded=told.append))
    loading.load_project()
    assert "x was not loaded, because unbuilt._C is not built." in told[0]


def test_an_op_without_a_kernel_says_what_was_loaded(tmp_path: Path) -> None:
    """In a folder outside the project, and in one of another project."""
    program = (
        "import torch; library = torch.library.Library('elsewhere', 'DEF');"
        "library.define('double(Tensor x) -> Tensor');"
        "torch.ops.elsewhere.double(torch.ones(2, device='mps'))"
    )

    def error() -> str:
        finished = python("-m", "mps_simulator", "-c", program, directory=tmp_path)
        return finished.stderr.splitlines()[-1]

    assert f"No pyproject.toml in {tmp_path} or above it has a table [tool.mps_simulator]" in error()
    assert "Start the program in the folder of the project" in error()
    path = write(tmp_path, '[[tool.mps_simulator.load]]\nname = "a"\nsources = ["*.mm"]\nextensions = ["absent._C"]\n')
    (tmp_path / "op.mm").touch()
    assert error().endswith(f"{path} has the kernels to load. a was not loaded, because absent._C is not built.")


def test_the_file_of_an_extension() -> None:
    file = project.extension_file("torch._C")
    assert file is not None and file.name.startswith("_C.")
    assert project.extension_file("math") is not None
