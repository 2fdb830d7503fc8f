"""Describes the machine and its device, tests whether it works, and reports what its compiler makes of kernels."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn._compiling import compile_source
from torch_gdn._mps import why_no_mps
from torch_gdn._recorder import KernelVariant
from torch_gdn.tools import info
from torch_gdn_check import facts
from torch_gdn_check.steps import Outcome, Skipped, on_simulated_device


def simulated_settings() -> dict[str, Any] | None:
    """Returns the simulated device's settings in this process, or None if it is not active."""
    mps_simulator = sys.modules.get("mps_simulator")  # already imported if it is active
    settings: dict[str, Any] | None = mps_simulator.active_settings() if mps_simulator else None
    return settings


def check_facts(device: torch.device) -> Outcome:
    figures: dict[str, Any] = {"versions": info.versions(), "system": info.system(), "mps": info.mps()}
    machine, absent = facts.machine_facts()
    figures |= {"ops": info.ops(), "simulated": simulated_settings(), "machine": machine, "absent": absent}
    return Outcome(figures, why_no_mps("check"))


def round_trip(device: torch.device) -> torch.Tensor:
    """Sends a tensor to the device, through an addition, and back."""
    return (torch.arange(64.0).to(device) + 1).cpu()


def check_use(device: torch.device) -> Outcome:
    """Checks whether PyTorch itself works on the device.

    On some virtual machines PyTorch cannot allocate memory; there, only the compiler can be checked.
    """
    try:
        right = torch.equal(round_trip(device), torch.arange(1.0, 65.0))
    except RuntimeError as error:
        if facts.is_virtual_mac():
            raise Skipped(f"PyTorch cannot use the GPU of a virtual machine: {error}") from error
        raise
    return Outcome(problem="" if right else "PyTorch's own addition gives wrong values on this device")


def compile_together(device: torch.device, variants: tuple[KernelVariant, ...]) -> Outcome:
    """Compiles variants of one file from one source. Each has a step of its own, which reports its error."""
    compile_source(list(variants))
    return Outcome()


def check_compiles(device: torch.device, variant: KernelVariant) -> Outcome:
    facts: dict[str, Any] = dict(_C.compile(variant.kernel, variant.file, list(variant.arguments)))
    if on_simulated_device():
        del facts["static_threadgroup_memory_length"]  # PyTorch only knows it after a kernel ran
    return Outcome(facts)


def check_pipelines(device: torch.device) -> Outcome:
    """Reports what the device's compiler made of every kernel that earlier steps ran."""
    return Outcome({"pipelines": _C.pipelines()} if _C.has_launcher() else {})
