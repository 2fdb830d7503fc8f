"""Collects facts about this machine, its GPU and the build. A missing fact is None, and `absent` says why."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_gdn import _C
from torch_gdn.tools import info
from torch_gdn_check.steps import Skipped

NOT_MACOS = "this exists on macOS only"


def asked(*command: str) -> str:
    """Returns what a macOS program prints."""
    if sys.platform != "darwin":
        raise Skipped(NOT_MACOS)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise Skipped(f"{' '.join(command)}: {error}") from error


def is_virtual() -> bool:
    """Returns whether macOS runs in a virtual machine."""
    return asked("sysctl", "-n", "kern.hv_vmm_present") == "1"


def is_virtual_mac() -> bool:
    return sys.platform == "darwin" and is_virtual()


def low_power_mode() -> bool:
    lines = [line.split() for line in asked("pmset", "-g").splitlines()]
    modes = [words[1] for words in lines if words[:1] == ["lowpowermode"]]
    if not modes:
        raise Skipped("pmset -g does not report it")
    return modes[0] == "1"


def device_fact(name: str) -> Any:
    if not _C.has_launcher():
        raise Skipped("there is no mps device")
    return dict(_C.device_facts())[name]


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def sdk() -> int:
    if _C.built_with_sdk is None:
        raise Skipped(NOT_MACOS)
    return int(_C.built_with_sdk)


FACTS: dict[str, Callable[[], Any]] = {
    "macOS build": lambda: asked("sw_vers", "-buildVersion"),
    "kernel": platform.version,
    "chip": info.chip,
    "memory bytes": memory_bytes,
    "CPU cores": os.cpu_count,
    "performance cores": lambda: int(asked("sysctl", "-n", "hw.perflevel0.physicalcpu")),
    "virtual machine": is_virtual,
    "low-power mode": low_power_mode,
    "GPU": lambda: device_fact("name"),
    "GPU cores": lambda: device_fact("core_count"),
    "GPU families": lambda: device_fact("families"),
    "registryID": lambda: device_fact("registry_id"),
    "maxBufferLength": lambda: device_fact("max_buffer_length"),
    "recommendedMaxWorkingSetSize": lambda: device_fact("recommended_max_working_set_size"),
    "torch": lambda: torch.__version__,
    "torch commit": lambda: torch.version.git_version,
    "torch at build": lambda: _C.built_with_torch,
    "compiler at build": lambda: _C.built_with_compiler,
    "macOS SDK at build": sdk,
}


def machine_facts() -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the facts, and why those that are None are missing."""
    facts: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, find in FACTS.items():
        try:
            facts[name] = find()
        except Skipped as reason:
            facts[name], absent[name] = None, str(reason)
    return facts, absent
