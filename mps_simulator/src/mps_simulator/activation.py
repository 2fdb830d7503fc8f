from __future__ import annotations

import sys
from typing import Any

import torch

from mps_simulator import device
from mps_simulator.loading import load_project


def check_torch() -> None:
    """Checks PyTorch's accelerator, since a process has only one. Unused CUDA can be hidden; the others cannot."""
    for name in ("hip", "xpu"):
        if getattr(torch.version, name, None):
            raise RuntimeError(
                "mps_simulator.activate(): expected a PyTorch built for the CPU or for CUDA, got "
                f"{torch.__version__}, built for {name.upper()}, which cannot also have mps: install its CPU build"
            )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "mps_simulator.activate(): CUDA is in use in this process, and PyTorch cannot also have mps: "
            "activate the simulated device first, or in a process of its own"
        )


def activate(watch: bool = True, seed: int = 0, perturb: bool = False, workers: int | None = None) -> None:
    """Makes device "mps" work, and loads what the project's pyproject.toml names (project.py).

    The arguments are those of `settings`. workers=None means one worker per core. The call first builds what changed
    since the last call. A second call only changes the settings. CUDA is hidden from the process, because a Mac has
    none. Raises BuildError if a tool is missing or a source does not compile, and RuntimeError if PyTorch cannot have
    an mps device.
    """
    if not device.is_open():
        if sys.platform != "linux":
            raise RuntimeError(f"the simulated device runs on Linux, not on {sys.platform}")
        check_torch()
        device.open_device()
    load_project()
    settings = device.settings
    settings.watch, settings.seed, settings.perturb, settings.workers = watch, seed, perturb, workers or 0


def active_settings() -> dict[str, Any] | None:
    """Returns the arguments for activate() in another process that should be like this one. None before activate()."""
    if not device.is_open():
        return None
    return {name: getattr(device.settings, name) for name in ("watch", "seed", "perturb", "workers")}
