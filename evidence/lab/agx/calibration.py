"""Compares Mesa's compiler with Apple's on kernels of llama.cpp, whose logs print Apple's figures on a Mac.

Apple's figure is maxTotalThreadsPerThreadgroup. It follows from a kernel's registers, in the same tiers as a core's
threads do here. The source is of the same month. It is downloaded from llama-cpp-python, under MIT's licence.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from evidence.lab.agx.compiler import Compiled, compile_program
from evidence.proof.dialects import closing, without_comments
from evidence.proof.mac.wheels import cache_directory, locked
from evidence.proof.reasons import Unavailable

PROJECT, VERSION = "llama-cpp-python", "0.2.11"
SOURCE = "vendor/llama.cpp/ggml-metal.metal"
THREADS = 64  # per threadgroup: two simdgroups

# These come from the log in github.com/ggml-org/llama.cpp/issues/3606, October 2023, where the kernels are named
# mul_mv.
OF_APPLE: Mapping[str, int] = {
    "kernel_mul_mat_q4_0_f32": 896,
    "kernel_mul_mat_q4_1_f32": 896,
    "kernel_mul_mat_q8_0_f32": 1024,
    "kernel_mul_mat_q2_K_f32": 640,
    "kernel_mul_mat_q3_K_f32": 576,
    "kernel_mul_mat_q4_K_f32": 576,
    "kernel_mul_mat_q5_K_f32": 576,
    "kernel_mul_mat_q6_K_f32": 1024,
}
# These are the most threads of a core, from 104 16-bit registers per thread to 256.
TIERS = (1024, 896, 832, 768, 704, 640, 576, 512, 448, 384)
MOST_APART = 1  # tiers, in the nearer pipeline


def program() -> str:
    directory = cache_directory() / "agx"
    archive = directory / f"{PROJECT.replace('-', '_')}-{VERSION}.tar.gz"
    with locked(directory):
        if not archive.exists():
            _download(directory)
    if not archive.exists():
        raise Unavailable(f"{PROJECT} {VERSION} was downloaded under another name than {archive.name}")
    with tarfile.open(archive) as files:
        text = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{SOURCE}")
        assert text is not None
        return text.read().decode()


def _download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", f"{PROJECT}=={VERSION}", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--no-binary", PROJECT, "--dest", str(directory)], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip gave no message").splitlines()[-1]
        raise Unavailable(f"no source of {PROJECT} {VERSION}: {reason}")


def alone(program: str, kernel: str) -> str:
    """Returns the program without its other kernels and the text after them, which use things that our shaders do
    not."""
    text, at, first = without_comments(program), 0, True
    text = text[: text.index("template <typename type4x4>")]
    head = re.compile(r"(?:template\s*<[^>]*>\s*)?\bkernel\s+void\s+(\w+)\s*(?=\()")
    while result := head.search(text, at):
        end = closing(text, text.index("{", closing(text, result.end()))) + 1
        if result[1] == kernel and first:
            at, first = end, False
        else:
            text, at = text[: result.start()] + text[end:], result.start()
    return re.sub(r"^(template \[\[host_name|typedef decltype).*", "", text, flags=re.MULTILINE)


def compiled() -> dict[str, Compiled]:
    text = program()
    return {kernel: compile_program(alone(text, kernel), kernel, (), THREADS) for kernel in OF_APPLE}


def tiers_apart(kernel: str, threads: int) -> int:
    """Returns a positive number if Mesa's compiler leaves a core more threads than Apple's."""
    return TIERS.index(OF_APPLE[kernel]) - TIERS.index(threads)


def problems_of(threads: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Names kernels that are too far from Apple's in every pipeline, with the threads that each leaves."""
    problems = []
    for kernel, by_pipeline in threads.items():
        apart = [abs(tiers_apart(kernel, each)) for each in by_pipeline.values()]
        if not apart or min(apart) > MOST_APART:
            has = ", ".join(f"{pipeline} {each}" for pipeline, each in by_pipeline.items()) or "no figures"
            problems.append(f"{kernel}: {has}, Apple's compiler {OF_APPLE[kernel]}: more than {MOST_APART} tiers apart")
    return problems
