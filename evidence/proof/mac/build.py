"""Compiles and links torch_gdn._C for arm64 macOS, with the ziglang package's clang and linker, against a macOS wheel.

The sources and flags are those that setup.py gives on a Mac. The headers are the wheel's, Apple's C and Objective-C
runtime headers from the ziglang package, and stub headers of the frameworks (checked in apple_headers.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from evidence.proof.mac import system_stubs
from evidence.proof.mac.extension import CHECKOUT, MacExtension, mac_extension
from evidence.proof.mac.macho import Image, read
from evidence.proof.mac.wheels import PYTHON_TAG, Wheel, cache_directory, locked

TARGET = "aarch64-macos.14.0"
STUB_HEADERS = (
    CHECKOUT / "evidence" / "proof" / "mac" / "include",
    CHECKOUT / "mps_simulator/src/mps_simulator/metal/include",
)
JOBS = 2
MODULE_FILE = f"_C.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
# torch_gdn/ and torch/ are neighbours in site-packages.
RPATH = "@loader_path/../torch/lib"

WARNINGS = ("-Wall", "-Werror")
# For macOS 14, Apple's clang takes nothing newer from libc++, and calls no sized operator delete, which torch's own
# libraries do not call either. These flags make zig's clang do the same.
AS_APPLE = (
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    "-fno-sized-deallocation",
)


class BuildError(RuntimeError):
    """Has the compiler's or the linker's output, and in `problems` the first error of each file."""

    def __init__(self, words: str, problems: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.problems = list(problems) or [first_error(words)]


def first_error(words: str) -> str:
    """Returns the compiler's first error."""
    return next((line for line in words.splitlines() if "error" in line), words.strip()[:200])


@dataclass(frozen=True)
class Build:
    torch: Wheel
    objects: dict[str, Path]  # source, relative to the checkout -> object file
    module: Path

    @property
    def image(self) -> Image:
        return read(self.module)


def _zig(arguments: Sequence[str], cwd: Path) -> None:
    # zig keeps every object under a hash of its inputs, and takes it from there in a second build.
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache_directory() / "zig")}
    command = [sys.executable, "-m", "ziglang", "c++", "-target", TARGET, *arguments]
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BuildError(finished.stderr.strip() or f"zig ended with status {finished.returncode}")


def compile_flags(extension: MacExtension, torch: Wheel) -> list[str]:
    include = torch.root / "torch" / "include"
    system = [*STUB_HEADERS, include, include / "torch" / "csrc" / "api" / "include", Path(_python_include())]
    return [
        *extension.compile_flags,
        *WARNINGS,
        *AS_APPLE,
        # Messages of TORCH_CHECK carry file names, and the wheel's must not name folders of this machine.
        *(f"-ffile-prefix-map={torch.root}/=", f"-ffile-prefix-map={CHECKOUT}/="),
        *(f"-I{directory}" for directory in extension.include_directories),
        *(flag for directory in system for flag in ("-isystem", str(directory))),
    ]


def _python_include() -> str:
    # CPython's headers differ between systems only in pyconfig.h, of which pybind11 uses nothing that differs here.
    return sysconfig.get_paths()["include"]


def compile_sources(
    torch: Wheel, sources: Sequence[str], directory: Path, done: Callable[[str], object] = lambda source: None
) -> tuple[dict[str, Path], dict[str, str]]:
    """Compiles each source. Returns the objects, and the compiler's output for each source that failed."""
    flags = compile_flags(mac_extension(), torch)
    directory.mkdir(parents=True, exist_ok=True)
    objects = {source: directory / (source.replace("/", "_") + ".o") for source in sources}
    errors = {}

    def work(source: str) -> None:
        try:
            _zig([*flags, "-c", str(CHECKOUT / source), "-o", str(objects[source])], CHECKOUT)
        except BuildError as error:
            errors[source] = str(error)
        done(source)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(work, sources))
    return {source: path for source, path in objects.items() if source not in errors}, errors


def torch_libraries(torch: Wheel) -> list[Path]:
    library = torch.root / "torch" / "lib"
    return [library / f"lib{name}.dylib" for name in mac_extension().libraries]


def apple_built_images(*wheels: Wheel) -> list[Image]:
    """Returns every library in the wheels, because they show what macOS has."""
    return [read(path) for wheel in wheels for path in sorted(wheel.root.rglob("*.dylib"))]


def link(torch: Wheel, objects: Sequence[Path], directory: Path, symbols: dict[str, frozenset[str]]) -> Path:
    """Links the module, two-level. CPython's own symbols stay open, because the interpreter supplies them.

    zig's linker has no `-U` for single symbols, so it leaves all open. mac_symbols.py then accepts only CPython's.
    """
    extension = mac_extension()
    stubs = system_stubs.write(directory / "stubs", symbols)
    output = directory / MODULE_FILE
    # Without -s, zig's compiler_rt would leave the names of its own build folders in the symbol table.
    arguments = ["-shared", "-O3", "-s", *map(str, objects), "-o", str(output)]
    arguments += ["-nostdlib++", *(str(stubs[f"/usr/lib/{name}"]) for name in ("libc++.1.dylib", "libobjc.A.dylib"))]
    arguments += [f"-F{directory / 'stubs'}", *extension.link_flags]
    arguments += [f"-L{torch.root / 'torch' / 'lib'}", *(f"-l{name}" for name in extension.libraries)]
    arguments += [f"-Wl,-install_name,@rpath/{MODULE_FILE}", f"-Wl,-rpath,{RPATH}", "-Wl,-undefined,dynamic_lookup"]
    output.unlink(missing_ok=True)
    _zig(arguments, directory)
    return output


def build_directory(torch: Wheel) -> Path:
    return cache_directory() / "mac" / f"{PYTHON_TAG}-torch-{torch.version}"


def build(torch: Wheel, others: Sequence[Wheel] = (), done: Callable[[str], object] = lambda source: None) -> Build:
    """Builds the whole extension. `others` are further wheels that show what macOS has."""
    directory = build_directory(torch)
    with locked(directory):
        objects, errors = compile_sources(torch, mac_extension().sources, directory, done)
        if errors:
            raise BuildError("\n".join(errors.values()), [first_error(words) for words in errors.values()])
        symbols = system_stubs.system_symbols(apple_built_images(torch, *others))
        return Build(torch, objects, link(torch, list(objects.values()), directory, symbols))
