"""Tests a PyTorch that was built for CUDA, as Linux's usual wheel is. The device hides CUDA, or says why it cannot.

A CPU build is made to look like one, with hooks that say that CUDA is built in, and a version of CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from mps_simulator import activation, requirements

Run: TypeAlias = Callable[[str], subprocess.CompletedProcess[str]]
HOOKS = """
#include <ATen/detail/CUDAHooksInterface.h>
namespace at {
struct BuiltHooks final : CUDAHooksInterface {
  explicit BuiltHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, BuiltHooks)
}
"""
LIBRARIES = ("-ltorch_cpu", "-lc10")
LOOK_LIKE_CUDA = """
import ctypes, sys
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])  # before torch, which asks for its hooks while it is imported
import torch
"""
A_GPU = """
torch.version.cuda = "13.0"
torch._C._cuda_getDeviceCount = lambda: 1
"""
ACTIVATE = """
import mps_simulator
mps_simulator.activate()
"""


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Builds a library with the hooks. Returns "" if PyTorch was built for CUDA and has its own."""
    if torch.version.cuda is not None:
        return ""
    root = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("cuda") / "libhooks.so"
    flags = ["-std=c++20", "-fPIC", "-shared", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    command = [
        requirements.clang(),
        "-x",
        "c++",
        "-",
        "-o",
        str(library),
        *flags,
        f"-Wl,-rpath,{root / 'lib'}",
        *LIBRARIES,
    ]
    subprocess.run(command, input=HOOKS, text=True, check=True)
    return str(library)


@pytest.fixture
def run(hooks: str, folder: Path) -> Run:
    def python(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LOOK_LIKE_CUDA + code, hooks]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)

    return python


def test_without_the_simulated_device_it_has_cuda(run: Run) -> None:
    result = run(A_GPU + "print(torch._C._accelerator_getAccelerator(), torch.cuda.device_count())")
    assert result.stdout.split() == ["cuda", "1"], result.stderr


def test_the_simulated_device_is_the_only_accelerator(run: Run) -> None:
    code = "print(torch.accelerator.current_accelerator(), torch.cuda.is_available(), torch.cuda.device_count())"
    result = run(A_GPU + ACTIVATE + code)
    assert result.stdout.split() == ["mps", "False", "0"], result.stderr


def test_opcheck_passes(run: Run) -> None:
    code = """
@torch.library.custom_op("probe::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
print(set(torch.library.opcheck(twice, (torch.ones(3, device="mps"),)).values()))
"""
    assert run(ACTIVATE + code).stdout.strip() == "{'SUCCESS'}"


def test_a_process_that_uses_cuda_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is in use in this process"):
        activation.check_torch()


@pytest.mark.parametrize("name", ["hip", "xpu"])
def test_another_build_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, name, "7.0", raising=False)
    with pytest.raises(RuntimeError, match=f"built for {name.upper()}.*install its CPU build"):
        activation.check_torch()
