"""Compares the linked module with the libraries that a Mac will load with it."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from evidence.proof.checks import Finding
from evidence.proof.mac.build import RPATH
from evidence.proof.mac.extension import CHECKOUT
from evidence.proof.mac.macho import FLAT, ITSELF, Image, Import, read
from evidence.proof.mac.wheels import cache_directory

MINIMUM_OS = (14, 0, 0)
OPENMP_LIBRARY = "libomp.dylib"
PARALLEL_REGION = "___kmpc_fork_call"  # at::parallel_for becomes a call of it
TORCH_LIBRARIES = tuple(f"@rpath/lib{name}.dylib" for name in ("c10", "torch", "torch_cpu", "torch_python"))
SYSTEM_LIBRARIES = (
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libc++.1.dylib",
    "/usr/lib/libobjc.A.dylib",
    "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
)


def is_python(symbol: str) -> bool:
    return symbol.lstrip("_").startswith("Py")


def _python_has(symbol: str) -> bool:
    """Returns whether this interpreter, which has the module's Python version, exports it."""
    return hasattr(ctypes.pythonapi, symbol.removeprefix("_"))


def openmp_symbols(torch: Iterable[Image]) -> frozenset[str]:
    """Returns the symbols of the OpenMP library in torch's wheel, which libtorch_cpu loads into every process.

    A module compiled for OpenMP looks its calls up without naming a library, because the wheel's library has an
    install name that exists nowhere."""
    images = {Path(image.install_name or "").name: image for image in torch}
    loaded = any(Path(name).name == OPENMP_LIBRARY for name in images["libtorch_cpu.dylib"].libraries)
    return images[OPENMP_LIBRARY].exports if loaded and OPENMP_LIBRARY in images else frozenset()


def check_imports(module: Image, torch: Iterable[Image], system: Mapping[str, frozenset[str]]) -> Finding:
    """Checks that every imported symbol exists. `torch` are the wheel's libraries, and `system` has macOS's symbols by
    install name. Only CPython's and OpenMP's may be looked up without a library.
    """
    torch = list(torch)
    openmp = openmp_symbols(torch)
    exports = {image.install_name: image.exports for image in torch} | dict(system)
    problems = []
    for symbol in module.imports:
        if symbol.library == FLAT:
            if symbol.name in openmp:
                continue
            if not is_python(symbol.name):
                problems.append(f"{symbol.name} is in no library that the module was linked against")
            elif not _python_has(symbol.name):
                problems.append(f"CPython {sys.version_info.major}.{sys.version_info.minor} has no {symbol.name}")
        elif symbol.library == ITSELF:
            if symbol.name not in module.exports:
                problems.append(f"{symbol.name} is looked up in the module itself, which has none")
        elif symbol.name not in exports.get(symbol.library, frozenset()):
            problems.append(f"{symbol.library} has no {symbol.name}")

    def origin(symbol: Import) -> str:
        if symbol.library != FLAT:
            return Path(symbol.library).name
        return "OpenMP" if symbol.name in openmp else "CPython"

    counts = Counter(origin(symbol) for symbol in module.imports)
    return Finding(len(module.imports), problems, [", ".join(f"{name} {n}" for name, n in sorted(counts.items()))])


def check_threads(module: Image) -> Finding:
    """Checks that the CPU ops run on more than one core: their loops were compiled as parallel regions."""
    is_parallel = PARALLEL_REGION in {symbol.name for symbol in module.imports}
    return Finding(1, [] if is_parallel else [f"it has no {PARALLEL_REGION}: its CPU ops run on one core"])


def check_selectors(module: Image, known: frozenset[str]) -> Finding:
    """Checks that every message that the module sends has a selector of Apple's."""
    problems = [
        f"no description of Apple's API has the selector {name}" for name in module.selectors if name not in known
    ]
    return Finding(len(module.selectors), problems)


def check_python_objects(objects: Mapping[str, Path], allowed: str) -> Finding:
    """Checks that only `allowed` among all objects uses CPython."""
    problems = []
    for source, path in objects.items():
        used = [symbol for symbol in read(path).undefined if is_python(symbol)]
        if used and source != allowed:
            problems.append(f"{source} uses {', '.join(used[:3])}: only {allowed} may use CPython")
    return Finding(len(objects), problems)


def check_load_commands(module: Image) -> Finding:
    """Checks how dyld will find the module's libraries, and on which systems."""
    facts = {
        f"is for {module.platform}, expected MACOS": module.platform == "MACOS",
        f"needs macOS {module.minimum_os}, torch {MINIMUM_OS}": module.minimum_os == MINIMUM_OS,
        "has no two-level namespace": "TWOLEVEL" in module.flags,
        "is not signed, which arm64 needs": "CODE_SIGNATURE" in module.commands,
        f"has the install name {module.install_name}": (module.install_name or "").startswith("@rpath/"),
        f"has the rpaths {module.rpaths}, expected {RPATH}": module.rpaths == (RPATH,),
        f"does not link against all of {TORCH_LIBRARIES}": set(TORCH_LIBRARIES) <= set(module.libraries),
        "exports no PyInit__C": "_PyInit__C" in module.exports,
    }
    problems = [f"the module {fact}" for fact, true in facts.items() if not true]
    unexpected = set(module.libraries) - set(TORCH_LIBRARIES) - set(SYSTEM_LIBRARIES)
    problems += [f"the module links against {name}" for name in sorted(unexpected)]
    return Finding(len(facts) + len(module.libraries), problems)


def check_no_build_paths(module: Path) -> Finding:
    """Checks that nothing in the file tells where it was built."""
    data = module.read_bytes()
    places = {str(CHECKOUT), str(cache_directory()), str(Path.home()), sys.prefix, sys.base_prefix, "site-packages"}
    problems = [f"the module contains the path {place}" for place in sorted(places) if place.encode() in data]
    return Finding(len(places), problems)
