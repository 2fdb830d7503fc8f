"""Builds torch_gdn._C and puts the shaders into the wheel. Everything else is in pyproject.toml."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

if sys.version_info < (3, 10):  # noqa: UP036  # an old pip runs this file before it reads requires-python
    sys.exit(f"torch_gdn needs Python 3.10 or later; this is Python {'.'.join(map(str, sys.version_info[:3]))}")
if sys.platform not in ("darwin", "linux"):
    sys.exit(f"torch_gdn builds on macOS (arm64) and on Linux; this is {sys.platform}")
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as missing:
    sys.exit(
        f"torch_gdn: {missing}. It is built with the installed PyTorch. Install that first:\n"
        "    pip install torch==2.13.0 numpy 'setuptools>=77.0.3' wheel ninja\n"
        "    pip install -e . --no-build-isolation"
    )

ROOT = Path(__file__).parent.resolve()
ON_MAC = sys.platform == "darwin"

# pip's ninja is next to the interpreter, whose environment need not be activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
if ON_MAC:
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")  # as torch's own wheel
    # python.org's Python would also build for Intel, for which there is no torch, and say so in the wheel's name.
    os.environ.setdefault("ARCHFLAGS", "-arch arm64")
    os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{os.environ['MACOSX_DEPLOYMENT_TARGET']}-arm64")
# OpenMP is only compiled against, never linked: at::parallel_for, which is inline in torch's headers, must use torch's
# own runtime, and not a second one. Apple's compiler takes the flag only for its front end, and omp.h from torch's
# wheel. With TORCH_GDN_SANITIZE=1, errors of memory and undefined behaviour end the process (make sanitize).
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
SANITIZE = SANITIZERS if os.environ.get("TORCH_GDN_SANITIZE") == "1" else []
OPTIMISE = ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]
OPENMP = ["-Xpreprocessor", "-fopenmp"] if ON_MAC else ["-fopenmp"]
COMPILE_FLAGS = ["-std=c++20", *OPTIMISE, "-Wall", *OPENMP, *(["-fno-objc-arc"] if ON_MAC else [])]

JOB_BYTES = 2 * 10**9  # g++ takes up to 1.8 GB of memory per source file
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's limit


def jobs() -> int:
    """Returns one compiler per core, as far as memory allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.is_file() else "max"
    if limit != "max":
        memory = min(memory, int(limit))
    return max(1, min(cores, memory // JOB_BYTES))


os.environ.setdefault("MAX_JOBS", str(jobs()))


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")  # as PyTorch does
    try:
        subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"torch_gdn: the C++ compiler does not run: {error}. On a Mac: xcode-select --install. "
            "On Linux install g++ (Debian, Ubuntu), gcc-c++ (Fedora) or gcc (Arch). CXX may name another compiler."
        )


def sources(*patterns: str, folder: str = "csrc") -> list[str]:
    """Returns the files below the folder that match, relative to the root. setuptools warns of each absolute path."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).glob(pattern))


def extension() -> Extension:
    # csrc/metal needs Metal's headers, so on Linux the simulated device builds it.
    everywhere = sources("bindings.cpp", "ops/*.cpp", "launch/*.cpp", "cpu/**/*.cpp")
    metal_half = sources("metal/**/*.cpp", "metal/*.mm")
    return CppExtension(
        "torch_gdn._C",
        everywhere + (metal_half if ON_MAC else []),
        # Hosts include both kinds of headers. On Linux, units include the sources.
        depends=[
            *everywhere,
            *sources("**/*.h"),
            *sources("**/*.h", folder="shaders"),
            str(VERSION_HEADER.relative_to(ROOT)),
        ],
        include_dirs=[str(ROOT), str(ROOT / "csrc"), str(ROOT / "shaders")],
        extra_link_args=SANITIZE + (["-framework", "Metal", "-framework", "Foundation"] if ON_MAC else []),
    )


# PyTorch's headers take more than half of the time of a source file, so g++ compiles them once. If g++ finds that the
# options differ, it reads the headers themselves.
SHARED_HEADERS = ("torch/library.h", "ATen/Parallel.h", "ATen/ops/empty.h")
QUIET = ["-Wno-sign-compare"]  # compiled headers lose the pragma that silences this warning in a header of PyTorch's


def precompiled(folder: Path, flags: list[str]) -> str:
    """Returns a line that includes the headers, compiled with these flags. They are compiled again if anything changed.
    Other compilers than g++ get none.
    """
    header, record = folder / "shared_headers.h", folder / "shared_headers.command"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version:
        return ""
    command = [*compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    wanted = "\n".join([torch.__version__, version, *SHARED_HEADERS, shlex.join(command)])
    if not record.is_file() or record.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text("".join(f"#include <{name}>\n" for name in SHARED_HEADERS))
        subprocess.run(command, check=True)
        record.write_text(wanted)
    return f'#include "{header.relative_to(ROOT)}"\n'


# These files need few of PyTorch's headers, and each compiles its kernels for several instruction sets.
ALONE = "csrc/cpu/simd"


def units(files: list[str], folder: Path, first_line: str) -> list[str]:
    """Writes one file per folder of csrc, which includes the folder's sources, so that the compiler reads PyTorch's
    headers once for all of them. Returns what to compile.
    """
    members: dict[str, list[str]] = {}
    for file in files:
        members.setdefault(str(Path(file).parent), []).append(file)
    result = members.pop(ALONE, [])
    for name, included in members.items():
        unit = folder / f"{name.replace('/', '_')}.cpp"
        text = first_line + "".join(f'#include "{file}"\n' for file in included)
        if not unit.is_file() or unit.read_text() != text:  # ninja compiles what is newer than its object
            folder.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
        result.append(str(unit.relative_to(ROOT)))
    return result


COMPILING = re.compile(rb"(\[\d+/\d+\]) .* -c (\S+) -o .*")


def shortened(line: bytes) -> bytes:
    """Returns "[13/66] csrc/bindings.cpp" for a line of ninja's, which has the whole command. Other lines stay."""
    return COMPILING.sub(lambda found: found[1] + b" " + os.path.relpath(found[2], os.fsencode(ROOT)), line)


@contextmanager
def short_progress():
    """Shortens the lines that PyTorch's ninja writes to stdout, the file of number 1, inside the block."""
    reader, writer = os.pipe()
    stdout = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)

    def copy() -> None:
        with open(reader, "rb") as lines, open(stdout, "wb", buffering=0) as shown:
            for line in lines:
                shown.write(shortened(line))

    copying = threading.Thread(target=copy)
    copying.start()
    restored = os.dup(stdout)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(restored, 1)  # closes the pipe, which ends the thread
        os.close(restored)
        copying.join()


VERSION_HEADER = ROOT / "build" / "version.h"


def write_version() -> None:
    """Writes the header with the version of the sources, unless it has it: a new header compiles bindings.cpp again."""
    version = runpy.run_path(str(ROOT / "torch_gdn" / "_version.py"))["__version__"]
    text = f'#define TORCH_GDN_VERSION "{version}"\n'
    if not VERSION_HEADER.is_file() or VERSION_HEADER.read_text() != text:
        VERSION_HEADER.parent.mkdir(exist_ok=True)
        VERSION_HEADER.write_text(text)


class BuildIncrementally(BuildExtension):
    """Shares one folder of objects among an editable install, a wheel and the packaging tests. ninja rebuilds what
    changed. A Mac compiles each source by itself, as the proof of the Mac build does.
    """

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "objects")
        write_version()

    def build_extensions(self):
        check_compiler()
        # One run of setup.py may come here twice, and torch adds its flags to the extension's each time. Flags that
        # differ from the earlier ones would compile everything again.
        for extension in self.extensions:
            extension.extra_compile_args = {"cxx": [*COMPILE_FLAGS, *([] if ON_MAC else QUIET)]}
        with short_progress():
            super().build_extensions()

    def build_extension(self, extension):
        files = extension.sources
        if not ON_MAC:
            folder = Path(self.build_temp)
            folders = [*extension.include_dirs, *self.compiler.include_dirs]
            flags = [*self.compiler.compiler_so[1:], *(f"-I{folder}" for folder in folders), *COMPILE_FLAGS, *QUIET]
            extension.sources = units(files, folder / "units", precompiled(folder, flags))
        super().build_extension(extension)
        extension.sources = files  # a source distribution has these


class BuildPythonAndShaders(build_py):
    """Puts shaders/ into a wheel as torch_gdn/shaders. A checkout or an editable install reads shaders/ itself."""

    def run(self):
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib) / "torch_gdn" / "shaders"
            shutil.rmtree(packaged, ignore_errors=True)  # drops shaders that were deleted since the last build
            shutil.copytree(ROOT / "shaders", packaged, ignore=shutil.ignore_patterns(".*"))


# Distributions in folders of a checkout, and what pip finds there.
NEIGHBOURS = {"torch_gdn_check": "check", "torch_gdn_engines": "engines"}


def named_by_folder(extras: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the extras with "torch_gdn_engines @ file:///..." instead of its version, if the folder is here."""

    def named(requirement: str) -> str:
        name = re.split("[<>=]", requirement)[0]
        folder = ROOT / NEIGHBOURS.get(name, name)
        return f"{name} @ {folder.as_uri()}" if name in NEIGHBOURS and folder.is_dir() else requirement

    return {extra: [named(str(requirement)) for requirement in requirements] for extra, requirements in extras.items()}


class DescribeCheckout(dist_info):
    """Describes a checkout to pip, which asks for this before it installs from the checkout. Wheels and source
    distributions name versions: other machines do not have the folders, and PyPI refuses them.
    """

    def finalize_options(self):
        if "setuptools.build_meta" in sys.modules:  # only pip imports it; the proof of the Mac wheel wants versions
            distribution: Any = self.distribution
            distribution.extras_require.update(named_by_folder(distribution.extras_require))  # its metadata holds it
        super().finalize_options()


class NameVersions(bdist_wheel):
    """Describes the wheel anew: pip hands the description of the checkout on, also to make a wheel for others."""

    def finalize_options(self):
        self.dist_info_dir = None
        super().finalize_options()


def long_description() -> str:
    """Returns the README without pictures and links that only work in the repository."""
    text = re.sub(r"!\[[^\]]*\]\((?!https:)[^)]*\)\n*", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]*)\]\((?!https:)[^)]*\)", r"\1", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[extension()],
    cmdclass={
        "build_ext": BuildIncrementally,
        "build_py": BuildPythonAndShaders,
        "dist_info": DescribeCheckout,
        "bdist_wheel": NameVersions,
    },
)
