"""Makes device "mps" the simulated one in an engine's processes, and gives SGLang what it finds on a Mac.

On a Mac SGLang installs stand-ins for Triton and for what torch.mps lacks. For that call it is told that this is a Mac.
"""

import importlib.util
import os
import platform
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[4]


def install_stubs_of_sglang() -> None:
    """Must run before `sglang` is imported, which on Linux would look for Triton."""
    name = "sglang._platform_stubs"
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "_platform_stubs.py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with patch.object(sys, "platform", "darwin"), patch.object(platform, "machine", lambda: "arm64"):
        module.install_platform_stubs()


if os.environ.get("SGLANG_ENGINE_TESTS"):
    # Without torch_gdn, whose extension would find no mps yet.
    OPERATORS = runpy.run_path(str(ROOT / "engines/torch_gdn_engines/torchvision_operators.py"))
    OPERATORS["declare"]()
    if not torch.backends.mps.is_available():
        import mps_simulator

        mps_simulator.activate()
        install_stubs_of_sglang()
