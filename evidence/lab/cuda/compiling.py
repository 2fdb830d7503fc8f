"""Compiles every kernel variant of a record with nvcc, each to its own cubin."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence.lab.cuda.dialect import cuda_source
from evidence.lab.cuda.record import LaunchRecord
from evidence.proof.metal.front_end import shader_text

SHIM = Path(__file__).with_name("shim")
PROBES = "probes"
# These warnings are about correct code: unused variables, and a constructor that a shared variable does not run.
QUIET = "177,550,2361,20012,20014"
FLAGS = ("-std=c++17", "-lineinfo", "-D__METAL__=1", "--expt-relaxed-constexpr", "-diag-suppress", QUIET)


class NoCompiler(RuntimeError):
    """Raised if nvcc is not installed."""


def nvcc() -> str:
    result = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not result:
        raise NoCompiler("nvcc is missing: pip's nvidia-cuda-nvcc has it")
    return result


def compile_cuda(source: str, cubin: Path, architecture: str) -> str:
    """Returns nvcc's errors, or "". Keeps a cubin of the same source."""
    text = cubin.with_suffix(".cu")
    if cubin.exists() and text.exists() and text.read_text() == source:
        return ""
    cubin.unlink(missing_ok=True)
    text.write_text(source)
    command = [nvcc(), "-cubin", f"-arch={architecture}", *FLAGS, "-I", str(SHIM), "-o", str(cubin), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]
    return "" if done.returncode == 0 else f"{cubin.stem}: {'; '.join(errors[:3])}"


def peer_cubin(source: str, folder: Path, name: str, architecture: str) -> Path:
    """Compiles a kernel of another system."""
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{name}.cubin"
    if wrong := compile_cuda(source, cubin, architecture):
        raise RuntimeError(wrong)
    return cubin


def compile_all(
    launches: Iterable[LaunchRecord], folder: Path, architecture: str, step: Callable[[str], None]
) -> list[str]:
    """Returns what nvcc refuses."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(launch: LaunchRecord) -> str:
        text = shader_text(launch.file)
        source = cuda_source(text, launch.name, launch.kernel, launch.arguments, launch.threads)
        wrong = compile_cuda(source, folder / f"{launch.name}.cubin", architecture)
        step(launch.name)
        return wrong

    wrong = [compile_cuda((SHIM / "probes.cu").read_text(), folder / f"{PROBES}.cubin", architecture)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong += pool.map(one, sorted(launches, key=lambda launch: "intra" not in launch.kernel))  # slow ones first
    return [each for each in wrong if each]
