"""Builds the simulated device, and libraries that run on it, with clang. Rebuilds only what changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from mps_simulator import requirements
from mps_simulator.objects import Objects

SIMULATOR = Path(__file__).resolve().parent
JOBS = 2


class BuildError(RuntimeError):
    """Raised with the report of the compiler or linker, or with a list of what to install."""


def cache_directory() -> Path:
    """Returns the folder for all build outputs: $MPS_SIMULATOR_CACHE, or ~/.cache/mps_simulator if it is not set."""
    named = os.environ.get("MPS_SIMULATOR_CACHE")
    return (Path(named).expanduser() if named else Path.home() / ".cache" / "mps_simulator").absolute()


def objects_directory() -> Path:
    return cache_directory() / "objects"


def check_tools() -> None:
    missing = [kind for kind in requirements.missing() if kind in requirements.DEVICE]
    if missing:
        names = {"clang": f"clang {requirements.OLDEST} or later", "python": "Python.h", "objective-c": "objc/objc.h"}
        wanted = ", ".join((names | requirements.HEADERS)[kind] for kind in missing)
        raise BuildError(f"the simulated device needs {wanted}: {requirements.install_command(missing)}")


@dataclass(frozen=True)
class Toolchain:
    """The compiler, and the flags that all objects share."""

    compiler: str
    common: tuple[str, ...]
    objective_c: tuple[str, ...]
    libraries: tuple[str, ...]

    @staticmethod
    @cache
    def make() -> Toolchain:
        check_tools()
        gcc = requirements.gcc_directory()
        assert gcc is not None  # check_tools() has looked for it
        root = Path(torch.__file__).resolve().parent  # environments that link to one torch share what is built
        system = [
            root / "include",
            root / "include/torch/csrc/api/include",
            sysconfig.get_paths()["include"],
        ]
        return Toolchain(
            compiler=requirements.clang(),
            common=(
                "-std=c++20",
                "-fPIC",
                "-fblocks",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                # -isystem would make -MMD leave out these headers
                *(f"-I{SIMULATOR / name / 'include'}" for name in ("foundation", "metal")),
                *(flag for path in system for flag in ("-isystem", str(path))),
                # last, because clang has its own intrinsics headers
                *("-idirafter", str(gcc / "include")),
            ),
            objective_c=(
                *("-x", "objective-c++", "-fobjc-runtime=gcc", "-fconstant-string-class=NSConstantString"),
                "-Werror=objc-method-access",  # otherwise a selector that is not simulated would fail at its first call
            ),
            libraries=(
                f"-L{root / 'lib'}",
                f"-Wl,-rpath,{root / 'lib'}",
                *("-ltorch_cpu", "-ltorch_python", "-ltorch", "-lc10"),
                *(f"-L{gcc}", "-lobjc", "-lBlocksRuntime", "-lboost_context", "-ldl", "-lpthread"),
            ),
        )

    def key(self) -> str:
        """Returns a folder name that is unique to the torch, the Python, the flags and the installation."""
        flags = [*self.common, *self.objective_c, *self.libraries]
        return _hash([torch.__version__, sys.version, self.compiler, str(SIMULATOR), *flags])

    def command(self, source: Path, output: Path, flags: Sequence[str]) -> list[str]:
        if source.suffix == ".c":
            return [
                self.compiler.replace("clang++", "clang"),
                "-O2",
                "-fPIC",
                "-MMD",
                "-c",
                str(source),
                "-o",
                str(output),
            ]
        language = self.objective_c if source.suffix == ".mm" else ()
        # Only the engine is worth the time that -O2 takes.
        level = "-O2" if is_engine(source) else "-O1"
        return [self.compiler, *self.common, level, *flags, "-MMD", *language, "-c", str(source), "-o", str(output)]

    def kept_by(self, source: Path, flags: Sequence[str]) -> list[str]:
        """Returns what an object depends on besides its files. A precompiled header changes nothing in it."""
        versions = [torch.__version__, str(torch.version.git_version), _version_of(self.compiler), sys.version]
        return [*versions, *self.command(source, Path("object"), flags)]

    def precompile(self, header: Path, output: Path, flags: Sequence[str]) -> list[str]:
        # -MD (unlike -MMD) lists torch's headers too, so a reinstalled torch makes this out of date. clang's own check
        # of their times would stop the build instead of repeating it.
        options = ["-O1", *flags, "-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp", "-MD"]
        return [self.compiler, *self.common, *options, "-x", "c++-header", "-c", str(header), "-o", str(output)]


@cache
def _version_of(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def is_engine(source: Path) -> bool:
    return SIMULATOR / "engine" in source.parents


def _hash(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], directory: Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}")


def _dependencies(depfile: Path) -> list[Path]:
    """Returns the files in a make rule written by -MMD. ccache may have made them relative to clang's directory."""
    text = depfile.read_text().replace("\\\n", " ")
    return [depfile.parent / name for name in text.split(":", 1)[1].split()]


def _is_current(output: Path, command: Sequence[str], inputs: Sequence[Path]) -> bool:
    record = output.with_suffix(output.suffix + ".command")
    if not output.exists() or not record.exists() or record.read_text() != shlex.join(command):
        return False
    built = output.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= built for path in inputs)


def _remember(output: Path, command: Sequence[str]) -> None:
    output.with_suffix(output.suffix + ".command").write_text(shlex.join(command))


# PyTorch's headers take three quarters of the compile time of a unit that includes them. Many units therefore share one
# precompiled header.
SHARED_HEADERS = "".join(f"#include <{name}>\n" for name in ("torch/library.h", "ATen/Parallel.h", "ATen/ops/empty.h"))
MANY = 8


def _includes_torch(source: Path) -> bool:
    return source.suffix == ".cpp" and not is_engine(source)


def _precompile(toolchain: Toolchain, output: Path, flags: Sequence[str]) -> None:
    header = output.with_suffix(".h")
    if not header.exists() or header.read_text() != SHARED_HEADERS:
        header.write_text(SHARED_HEADERS)
    command = toolchain.precompile(header, output, flags)
    depfile = output.with_suffix(".d")
    if not depfile.exists() or not _is_current(output, command, [header, *_dependencies(depfile)]):
        _run(command, output.parent)
        _remember(output, command)


def _kept_objects(directory: Path, project: Path) -> Objects:
    """Returns the objects of all checkouts. Where the project, this package, torch and the build lie does not count."""
    torch_folder = Path(torch.__file__).resolve().parent
    roots = {"simulator": SIMULATOR, "torch": torch_folder, "build": directory, "project": project}
    return Objects(objects_directory(), roots)


def _project_of(sources: Sequence[Path]) -> Path:
    """Returns the folder with the pyproject.toml that is nearest to all sources, or else the sources' folder."""
    folder = Path(os.path.commonpath([source.absolute().parent for source in sources]))
    return next((each for each in (folder, *folder.parents) if (each / "pyproject.toml").is_file()), folder)


def _compile(
    toolchain: Toolchain, directory: Path, project: Path, sources: Sequence[Path], flags: Sequence[str]
) -> list[Path]:
    jobs: list[tuple[Path, Path, list[str]]] = []
    objects = []
    kept = _kept_objects(directory, project)
    precompiled = directory / "shared_headers.pch" if sum(map(_includes_torch, sources)) >= MANY else None
    for source in sources:
        target = directory / f"{source.as_posix().strip('/').replace('/', '_')}.o"
        shared = [precompiled] if precompiled and _includes_torch(source) else []
        options = [*flags, *(word for path in shared for word in ("-include-pch", str(path)))]
        command = toolchain.command(source, target, options)
        depfile = target.with_suffix(".d")
        # If all objects are those of another checkout, there is no precompiled header.
        inputs = [path for path in shared if path.exists()]
        if not depfile.exists() or not _is_current(target, command, [*_dependencies(depfile), *inputs]):
            if kept.restore(source, toolchain.kept_by(source, flags), target):
                _remember(target, command)
            else:
                jobs.append((source, target, command))
        objects.append(target)
    if precompiled and any(_includes_torch(source) for source, *_ in jobs):
        _precompile(toolchain, precompiled, flags)
    failed = threading.Event()

    def work(job: tuple[Path, Path, list[str]]) -> None:
        if failed.is_set():
            return
        source, target, command = job
        target.unlink(missing_ok=True)
        started = time.time_ns()
        try:
            _run(command, directory)
        except BuildError:
            failed.set()
            raise
        os.utime(target, ns=(started, started))  # so that a header saved meanwhile is newer
        _remember(target, command)
        inputs = _dependencies(target.with_suffix(".d"))
        if _is_current(target, command, inputs):
            kept.keep(source, toolchain.kept_by(source, flags), target, inputs)

    with ThreadPoolExecutor(JOBS) as pool:
        for _ in pool.map(work, jobs):
            pass
    return objects


def _link(
    compiler: str, output: Path, objects: Sequence[Path], flags: Sequence[str], inputs: Sequence[Path] = ()
) -> Path:
    command = [compiler, "-shared", "-o", str(output), *map(str, objects), f"-Wl,-soname,{output.name}", *flags]
    if not _is_current(output, command, [*objects, *inputs]):
        # A running process may have the old file mapped: write a new file, then replace the old one.
        unfinished = output.with_name(f"new_{output.name}")
        command[3] = str(unfinished)
        _run(command, output.parent)
        command[3] = str(output)
        unfinished.replace(output)
        _remember(output, command)
    return output


def _united(directory: Path, sources: Sequence[Path], units: Sequence[Path]) -> list[Path]:
    """Writes one file per folder of `units`, which includes them. Returns these files and the other sources."""
    folders: dict[Path, list[Path]] = {}
    for source in units:
        folders.setdefault(source.parent, []).append(source)
    directory.mkdir(exist_ok=True)
    united = []
    root = os.path.commonpath(folders) if folders else ""
    for folder, members in folders.items():
        unit = directory / f"{folder.name}_{_hash([os.path.relpath(folder, root)])}.cpp"
        text = "".join(f'#include "{member}"\n' for member in members)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        united.append(unit)
    return [*united, *(source for source in sources if source not in set(units))]


def device_sources() -> list[Path]:
    patterns = ("engine/*/*.cpp", "foundation/*.mm", "foundation/*.c", "metal/*.mm", "pytorch/*.cpp")
    return sorted(path for pattern in patterns for path in SIMULATOR.glob(pattern))


MODULE = "_device"
DEVICE_FLAGS = (
    f"-iquote{SIMULATOR.parent}",  # with -I, the compiler would look for <header> there too
    "-Wall",
    "-Werror",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
)


def build_device() -> Path:
    """Builds the library of the simulated device, which is a Python module."""
    toolchain = Toolchain.make()
    directory = cache_directory() / "device" / toolchain.key()
    with _locked(directory):
        sources = device_sources()
        # Each of these takes most of PyTorch's headers and its bindings of Python.
        units = [source for source in sources if source.parent == SIMULATOR / "pytorch"]
        objects = _compile(
            toolchain, directory, SIMULATOR.parent, _united(directory / "units", sources, units), DEVICE_FLAGS
        )
        module = directory / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
        return _link(toolchain.compiler, module, objects, toolchain.libraries)


def build_library(
    name: str,
    sources: Sequence[Path],
    device: Path,
    libraries: Sequence[Path] = (),
    *,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    units: Sequence[Path] = (),
) -> Path:
    """Builds Objective-C++ and C++ into a shared library linked against the device. See mps_simulator.load()."""
    toolchain = Toolchain.make()
    flags = [
        f"-DTORCH_EXTENSION_NAME={name.rpartition('.')[2]}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        *(f"-I{folder}" for folder in include),
        *flags,
        *shlex.split(os.environ.get("MPS_SIMULATOR_FLAGS", "")),
    ]
    # A new source leaves the other objects unchanged. Each set of sources has its own library.
    directory = device.parent / "libraries" / f"{name}-{_hash([*map(str, libraries), *flags])}"
    with _locked(directory):
        compiled = [*_united(directory / "units", sources, units), SIMULATOR / "foundation/personality.c"]
        objects = _compile(toolchain, directory, _project_of(sources), compiled, flags)
        linked = (device, *libraries)
        rpaths = (f"-Wl,-rpath,{path.parent}" for path in linked)
        flags = [*map(str, linked), *toolchain.libraries, *rpaths]
        place = directory / _hash(map(str, sources))
        place.mkdir(exist_ok=True)
        return _link(toolchain.compiler, place / f"lib{name}.so", objects, flags, linked)
