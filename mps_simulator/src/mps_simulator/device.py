"""The loaded library of the simulated device, and its settings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from mps_simulator import build, patches, requirements
from mps_simulator.fault import Fault

_device: ModuleType | None = None


def device_module() -> Any:
    """Returns the library as a Python module. Raises RuntimeError before activate()."""
    if _device is None:
        raise RuntimeError("the simulated device is not active: call mps_simulator.activate() first")
    return _device


def is_open() -> bool:
    return _device is not None


def import_extension(name: str, path: Path) -> ModuleType:
    """Imports the extension module in the file without entering it in sys.modules."""
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # because it has a loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def open_device() -> None:
    """Builds the library, loads it and connects it to PyTorch."""
    global _device
    path = build.build_device()
    # Global, since the libraries that kernels are compiled to find the engine's functions by name.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module: Any = import_extension(build.MODULE, path)
    finally:
        sys.setdlopenflags(flags)
    module.set_directories(str(build.SIMULATOR / "engine"), str(build.cache_directory() / "shaders"))
    clang = shutil.which(build.Toolchain.make().compiler)
    module.set_tools(clang, shutil.which("ld"), str(requirements.gcc_directory()))
    module.set_fault_class(Fault)
    module.settings().march = os.environ.get("MPS_SIMULATOR_MARCH") or "native"
    patches.apply(module)
    _device = module


class Settings:
    """Live settings of the engine and of the command buffers. `with settings(seed=5):` sets them for a block.

    watch: checks every memory access. detailed: also counts the accesses of simdgroups, as profile(detailed=True) does.
    seed: decides the order of lanes and simdgroups; 0 means ascending. perturb: adds noise within the ULP table of the
    Metal specification, shuffles reductions, and flushes denormals. workers: the number of threads; 0 means one per
    core. parts: divides the threadgroups of each dispatch into this many equal parts, and runs only the last one.
    strict: shaders must be C++14, as Metal 3.1 is. If it is off, features of C++17 pass; Apple's compiler accepts them
    with a warning. march: the instruction set that shaders are compiled for, as in clang's -march; $MPS_SIMULATOR_MARCH
    or "native" at first. all_lanes: every lane of a simdgroup must reach a simdgroup operation. If it is off, the
    operation takes the lanes that reach it, as Metal does. run_at: "wait" (commands run when the host waits for them)
    or "commit". encoder: "serial" or "concurrent". With "concurrent", dispatches between two memory barriers run in
    reverse order.
    """

    _names = ("watch", "detailed", "seed", "perturb", "workers", "parts", "strict", "march", "all_lanes")
    _every = (*_names, "run_at", "encoder")

    def __getattr__(self, name: str) -> Any:
        if name == "run_at":
            return "commit" if device_module().run_at_commit() else "wait"
        if name == "encoder":
            return "concurrent" if device_module().is_concurrent() else "serial"
        if name not in self._names:
            raise AttributeError(f"settings has no {name!r}: expected one of {', '.join(self._every)}")
        return getattr(device_module().settings(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        device_module().synchronize()  # what was encoded before runs under the old settings
        if name == "run_at":
            if value not in ("wait", "commit"):
                raise ValueError(f"run_at: expected 'wait' or 'commit', got {value!r}")
            device_module().set_run_at_commit(value == "commit")
        elif name == "encoder":
            if value not in ("serial", "concurrent"):
                raise ValueError(f"encoder: expected 'serial' or 'concurrent', got {value!r}")
            device_module().set_concurrent(value == "concurrent")
        elif name in self._names:
            setattr(device_module().settings(), name, value)
        else:
            raise AttributeError(f"settings has no {name!r}: expected one of {', '.join(self._every)}")

    @contextmanager
    def __call__(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={getattr(self, name)!r}' for name in self._every)})"


settings = Settings()
