"""Says whether PyTorch has an mps device here and, if not, why and what to do about it. Asks the system for facts."""

import platform
import subprocess
import sys

import torch

from torch_gdn._library import PACKAGE


def why_no_mps(command: str = "") -> str:
    """Returns why there is no mps device, or "" if there is one.

    `command` of `python -m torch_gdn` also runs on the simulated device, such as "tune".
    """
    if torch.backends.mps.is_available():
        return ""
    reason = "this PyTorch has no mps device"
    if sys.platform == "darwin":
        minor = int(torch.__version__.split(".")[1])
        needed = "macOS 15 or later (torch 2.13 and 2.14: 14 or later)" if minor >= 15 else "macOS 14 or later"
        here = f"macOS {platform.mac_ver()[0]} on {platform.machine()}"
        return f"{reason}: torch {torch.__version__} needs {needed} on Apple silicon, and this is {here}"
    if command and sys.platform == "linux" and (PACKAGE.parent / "mps_simulator").is_dir():
        return f"{reason}; this checkout has a simulated one: python -m mps_simulator -m torch_gdn {command}"
    return f"{reason}: mps is the GPU of a Mac"


def command_output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
