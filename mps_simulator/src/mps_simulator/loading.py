"""Builds Objective-C++ and C++ for the simulated device and loads it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mps_simulator import build
from mps_simulator.device import device_module, import_extension
from mps_simulator.project import extension_file, find_project, read_project

PathLike = str | os.PathLike[str]


def load(
    sources: PathLike | Sequence[PathLike],
    *,
    name: str | None = None,
    include: Sequence[PathLike] = (),
    libraries: Sequence[PathLike] = (),
    flags: Sequence[str] = (),
    units: Sequence[PathLike] = (),
) -> Path:
    """Builds .mm and .cpp files, unchanged from a Mac, and loads them. Their ops are then in torch.ops.

        mps_simulator.activate()
        mps_simulator.load("my_op.mm")
        torch.ops.my_ops.twice(torch.ones(3, device="mps"))

    sources: one file or several. name: the name of the library, by default that of the first file. If a source has
    PYBIND11_MODULE(TORCH_EXTENSION_NAME, m), you also import the library by this name, which may have dots. include:
    folders of headers in addition to PyTorch's and Metal's. libraries: shared libraries to link against. flags: more
    flags for the compiler, such as "-DNAME=1". units: .cpp files among the sources that compile together, one unit per
    folder, which is quicker if they are many. The files of a folder must not reuse names of their unnamed namespaces.

    Returns the library's path, in the cache. Compiles only what changed. A library that a process has loaded does not
    change. Raises build.BuildError with the compiler's message, or RuntimeError before activate().
    """
    device = Path(device_module().__file__)
    paths = [Path(source).resolve() for source in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    if not paths:
        raise ValueError("mps_simulator.load(): expected at least one source, got none")
    for path in paths:
        if path.suffix not in (".mm", ".cpp"):
            raise ValueError(f"mps_simulator.load(): expected .mm or .cpp files, got {path}")
        if not path.is_file():
            raise FileNotFoundError(f"mps_simulator.load(): no file {path}")
    name = name or paths[0].stem
    library = build.build_library(
        name,
        paths,
        device,
        [Path(path).resolve() for path in libraries],
        include=[Path(path).resolve() for path in include],
        flags=flags,
        units=[Path(path).resolve() for path in units],
    )
    torch.ops.load_library(str(library))
    if hasattr(ctypes.CDLL(str(library)), f"PyInit_{name.rpartition('.')[2]}"):
        sys.modules[name] = import_extension(name, library)
    return library


def load_project() -> None:
    """Loads what the project's pyproject.toml names, once per process. The error of an op without a kernel tells it."""
    if path := find_project():
        what = _load_project(path)
    else:
        what = (
            f"No pyproject.toml in {Path.cwd()} or above it has a table [tool.mps_simulator], so no kernels are "
            "loaded. Start the program in the folder of the project that has them, or call mps_simulator.load()."
        )
    device_module().say_what_is_loaded(what)


@functools.cache
def _load_project(path: Path) -> str:
    """Loads the entries, and says which. Skips an entry whose extension is not built."""
    told = [f"{path} has the kernels to load."]
    for entry in read_project(path):
        lacking = [module for module in entry.extensions if not extension_file(module)]
        if lacking:
            told.append(f"{entry.name} was not loaded, because {', '.join(lacking)} is not built.")
            continue
        told.append(f"{entry.name} was loaded.")
        modules = [importlib.import_module(module) for module in entry.extensions]
        load(
            entry.sources,
            name=entry.name,
            include=entry.include,
            libraries=[str(module.__file__) for module in modules],
            flags=entry.flags,
            units=entry.units,
        )
    return " ".join(told)
