"""Builds and loads the simulated device, and connects it to PyTorch."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from simulator import build, patches
from simulator.fault import Fault

_device: ModuleType | None = None


def device_module() -> Any:
    """The loaded library of the simulated device."""
    if _device is None:
        raise RuntimeError("the simulated device is not active: call simulator.activate() first")
    return _device


class Settings:
    """Live settings of the engine and of the command buffers.

    watch: check every memory access. detailed: count the accesses of simdgroups too, as profile(detailed=True) does.
    seed: order of lanes and simdgroups, 0 is ascending. perturb: noise within the Metal specification's ULP table,
    shuffled reductions, flushed denormals. workers: threads, 0 is one for each core. run_at: "wait" (commands run when
    somebody waits for them) or "commit".
    """

    _names = ("watch", "detailed", "seed", "perturb", "workers")

    def __getattr__(self, name: str) -> Any:
        if name == "run_at":
            return "commit" if device_module().run_at_commit() else "wait"
        if name not in self._names:
            raise AttributeError(f"settings has no {name!r}: expected one of {', '.join(self._names)}, run_at")
        return getattr(device_module().settings(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        device_module().synchronize()  # what was encoded before runs under the old settings
        if name == "run_at":
            if value not in ("wait", "commit"):
                raise ValueError(f"run_at: expected 'wait' or 'commit', got {value!r}")
            device_module().set_run_at_commit(value == "commit")
        elif name in self._names:
            setattr(device_module().settings(), name, value)
        else:
            raise AttributeError(f"settings has no {name!r}: expected one of {', '.join(self._names)}, run_at")

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={getattr(self, name)!r}' for name in (*self._names, 'run_at'))})"


settings = Settings()


def _load(path: Path) -> ModuleType:
    # Global, since the libraries that kernels are compiled to find the engine's functions by name.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        loader = ExtensionFileLoader(build.MODULE, str(path))
        module = importlib.util.module_from_spec(ModuleSpec(build.MODULE, loader, origin=str(path)))
        loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module


def _load_metal_half(device: Path) -> None:
    """The Metal half of torch_gdn, where the package is installed: what a Mac builds and Linux leaves out."""
    try:
        spec = importlib.util.find_spec("torch_gdn._C")
    except ModuleNotFoundError:
        return
    sources = build.metal_half_sources()
    if spec is None or spec.origin is None or not sources:
        return
    importlib.import_module("torch_gdn._C")
    library = build.build_library("torch_gdn_metal", sources, device, [Path(spec.origin)])
    torch.ops.load_library(str(library))


def check_torch() -> None:
    """PyTorch has one accelerator in a process. CUDA can be hidden, unless somebody uses it; the others cannot."""
    for name in ("hip", "xpu"):
        if getattr(torch.version, name, None):
            raise RuntimeError(
                "simulator.activate(): expected a PyTorch built for the CPU or for CUDA, got "
                f"{torch.__version__}, built for {name.upper()}, which cannot have mps beside it: install its CPU build"
            )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "simulator.activate(): CUDA is in use in this process, and PyTorch cannot have mps beside it: "
            "activate the simulated device first, or in a process of its own"
        )


def activate(watch: bool = True, seed: int = 0, perturb: bool = False, workers: int | None = None) -> None:
    """Makes device "mps" work, and loads torch_gdn's Metal half where torch_gdn is installed.

    Builds first what changed since the last time. Called again, it only takes the settings. CUDA is hidden from the
    process: a Mac has none.
    """
    global _device
    if _device is None:
        if sys.platform != "linux":
            raise RuntimeError(f"the simulated device runs on Linux, not on {sys.platform}")
        check_torch()
        path = build.build_device()
        module = _load(path)
        module.set_engine_directory(str(build.CHECKOUT / "simulator" / "engine"))
        module.set_fault_class(Fault)
        patches.apply(module)
        _device = module
        _load_metal_half(path)
    settings.watch, settings.seed, settings.perturb, settings.workers = watch, seed, perturb, workers or 0
