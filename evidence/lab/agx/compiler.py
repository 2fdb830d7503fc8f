"""Runs Mesa's compiler for Apple's GPUs on a kernel variant.

The compiler is in a Debian 13 in a folder of the cache. make_compiler.sh builds it in a chroot, so it needs root, or
sudo without a password. The cache keeps the figures of a variant by a hash of all their inputs, so that only changes
compile.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence.lab.agx import issue, rules
from evidence.lab.agx.dialect import opencl
from evidence.lab.agx.spaces import resolved
from evidence.proof.mac.wheels import cache_directory, locked
from evidence.proof.reasons import Unavailable

HERE = Path(__file__).resolve().parent
MAKE = HERE / "make_compiler.sh"
MESA = re.findall(r"^mesa=(.*)$", MAKE.read_text(), re.MULTILINE)[0]
SPACE_NEEDED = 4 << 30
SOURCES = [
    HERE.parents[2] / "evidence/proof/dialects.py",
    *(HERE / f"{name}.py" for name in ("compiler", "dialect", "issue", "rules", "spaces")),
]

# clang's -O2, and a pipeline that does not move loads and computations out of loops and over branches (LICM, GVN),
# because such moves lengthen what registers must hold. Apple's pipeline is neither, so we believe what both say.
PIPELINES = {
    "O2": "default<O2>",
    "lean": (
        "function(sroa,early-cse,instcombine<no-verify-fixpoint>,simplifycfg,loop-simplify,lcssa),"
        "function(loop(loop-rotate,indvars,loop-unroll-full)),"
        "function(sroa,early-cse<memssa>,instcombine<no-verify-fixpoint>,simplifycfg,dce)"
    ),
}
FRONT = (
    *("clang-19", "-x", "clcpp", "-cl-std=CLC++2021", "--target=spir64-unknown-unknown", "-O2", "-w"),
    *("-Xclang", "-finclude-default-header", "-Xclang", "-fdeclare-opencl-builtins", "-Xclang", "-disable-llvm-passes"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-ffp-contract=fast", "-fno-discard-value-names", "-fno-builtin-memset"),
    *("-S", "-emit-llvm", "-I", "shim"),
)
INLINE = "always-inline,globaldce,function(sroa,simplifycfg,early-cse,sroa)"


class Failed(Exception):
    """Raised with a message if a step of the compilation fails."""


class MesaFailed(Failed):
    """Raised if Mesa's own compiler fails."""


@dataclass(frozen=True)
class Figures:
    """The compiler's own counts for one pipeline's machine code."""

    registers: int  # 32-bit registers; a half counts as one
    threads: int  # the most that a core holds
    scratch: int  # bytes per thread in device memory
    spills: int
    fills: int
    instructions: int
    cycles: int  # estimate for the slower of the fp16 and fp32 pipelines
    cycles_integer: int  # estimate for the integer and complex pipeline
    uniforms: int  # 16-bit registers that all threads share, out of 512
    loops: int
    issue_start: int  # at least so many hundredths of an instruction that a simdgroup issues: issue.py
    issue_float: int
    issue_device: int
    issue_threadgroup: int
    issue_barrier: int
    issue_matrix: int


@dataclass(frozen=True)
class Compiled:
    name: str
    figures: dict[str, Figures]  # by pipeline
    failures: dict[str, str]  # by pipeline, the message of Mesa's compiler if it fails
    problems: list[str]  # rules that the code breaks, and what LLVM does not take


@functools.cache
def key() -> str:
    digest = hashlib.sha256()
    for path in (MAKE, HERE / "mesa.patch"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def root() -> Path:
    """Returns the Debian that has the compiler, and builds it if needed. Unavailable says why that is not possible."""
    directory = cache_directory() / "agx" / key()
    with locked(directory):
        if not (directory / "root/usr/local/bin/asahi_clc").exists():
            _make(directory / "root")
    as_root()
    return directory / "root"


@functools.cache
def as_root() -> tuple[str, ...]:
    """Returns the prefix of a command that only root may run."""
    if os.geteuid() == 0:
        return ()
    if shutil.which("sudo") and not subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode:
        return ("sudo", "-n")
    raise Unavailable("no compiler: a chroot needs root, or sudo without a password")


@functools.cache
def versions() -> str:
    """Returns the versions of everything that decides the figures."""
    listed = subprocess.run(
        [
            *as_root(),
            "chroot",
            str(root()),
            "dpkg-query",
            "-W",
            "-f",
            "${Package} ${Version}, ",
            "clang-19",
            "llvm-spirv-19",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return f"{listed.stdout}Mesa {MESA}, patch {hashlib.sha256((HERE / 'mesa.patch').read_bytes()).hexdigest()[:12]}"


def _make(target: Path) -> None:
    root_first = as_root()
    if shutil.which("debootstrap") is None:
        raise Unavailable("no compiler: debootstrap is missing: apt-get install debootstrap")
    if shutil.disk_usage(target.parent).free < SPACE_NEEDED:
        raise Unavailable(f"no compiler: {target.parent} has less than {SPACE_NEEDED >> 30} GB free")
    done = subprocess.run([*root_first, str(MAKE), str(target)], capture_output=True, text=True)
    if done.returncode:
        last = ([line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no message"])[-1]
        raise Unavailable(f"no compiler: {MAKE.name} failed: {last}")


def _inside(directory: Path, command: Sequence[str], **environment: str) -> str:
    """Runs a program of the chroot in a folder below its /tmp."""
    prefix = [*as_root(), "chroot", str(root()), "env", "-C", f"/tmp/{directory.name}"]
    prefix += [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run([*prefix, *command], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"error|Assertion|invalid", line, re.IGNORECASE)]
        raise Failed(f"{command[0]}: {(errors or lines or ['no message'])[0].strip()}")
    return done.stdout + done.stderr


def compile_program(program: str, kernel: str, arguments: Sequence[str], threads: int) -> Compiled:
    """Takes the result from the cache if no input has changed."""
    digest = hashlib.sha256(f"{key()} {kernel} {arguments} {threads}".encode())
    for path in sorted([*SOURCES, *(HERE / "shim").iterdir()]):
        digest.update(path.read_bytes())
    digest.update(program.encode())
    kept = cache_directory() / "agx" / "figures" / f"{digest.hexdigest()[:32]}.json"
    if kept.exists():
        result = json.loads(kept.read_text())
        return Compiled(**{**result, "figures": {name: Figures(**each) for name, each in result["figures"].items()}})
    compiled = _compile(program, kernel, arguments, threads)
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(compiled)))
    unfinished.rename(kept)
    return compiled


def _compile(program: str, kernel: str, arguments: Sequence[str], threads: int) -> Compiled:
    name = "_".join((kernel, *arguments))
    result = Compiled(name, {}, {}, [])
    with tempfile.TemporaryDirectory(dir=root() / "tmp") as folder:
        directory = Path(folder)
        try:
            lowered = to_llvm(directory, opencl(program, kernel, arguments, threads))
            result.problems.extend(rules.source_problems(lowered))
            for pipeline, passes in PIPELINES.items():
                code = optimised(directory, lowered, passes)
                if pipeline == "O2":
                    result.problems.extend(rules.optimised_problems(code))
                try:
                    result.figures[pipeline] = read_figures(to_agx(directory))
                except MesaFailed as failure:
                    result.failures[pipeline] = str(failure)
        except Failed as failure:
            result.problems.append(str(failure))
    return result


def to_llvm(directory: Path, text: str) -> str:
    """Returns LLVM's code before optimisation. It is inlined, and every pointer has its address space."""
    shutil.copytree(HERE / "shim", directory / "shim")
    (directory / "program.clcpp").write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{text}")
    _inside(directory, [*FRONT, "-o", "a.ll", "program.clcpp"])
    code = (directory / "a.ll").read_text()
    code = re.sub(r"^(define (?!.*spir_kernel).*?\).*?) (#\d+)(.*)$", r"\1 alwaysinline \2\3", code, flags=re.MULTILINE)
    (directory / "a.ll").write_text(code)
    _inside(directory, ["opt-19", f"-passes={INLINE}", "a.ll", "-S", "-o", "b.ll"])
    return resolved((directory / "b.ll").read_text())


def optimised(directory: Path, lowered: str, passes: str) -> str:
    """Returns the code after a pipeline, and writes its SPIR-V into the folder."""
    (directory / "c.ll").write_text(lowered)
    no_vectors = ["-vectorize-loops=false", "-vectorize-slp=false"]
    _inside(directory, ["opt-19", f"-passes={passes}", *no_vectors, "c.ll", "-S", "-o", "d.ll"])
    _inside(directory, ["opt-19", "d.ll", "-o", "d.bc"])
    _inside(directory, ["llvm-spirv-19", "--spirv-max-version=1.4", "d.bc", "-o", "d.spv"])
    return (directory / "d.ll").read_text()


def to_agx(directory: Path) -> str:
    """Returns what Mesa's compiler says about the folder's SPIR-V: the listing, and a line of figures."""
    says = {"AGX_MESA_DEBUG": "shaderdb,shaders,internal", "MESA_SHADER_CACHE_DISABLE": "true"}
    try:
        return _inside(directory, ["asahi_clc", "d.spv", "d.h", "d.c"], **says)
    except Failed as failure:
        raise MesaFailed(_without_places(str(failure))) from None


def _without_places(message: str) -> str:
    """Returns `agx_validate_ra: "invalid RA"` from an assertion's message."""
    assertion = re.search(r"(\w+): Assertion `(?:!\"\" )?(.*?)' failed", message)
    return f"{assertion[1]}: {assertion[2]}" if assertion else message.removeprefix("asahi_clc: ")


def read_figures(listing: str) -> Figures:
    """Reads the compiler's `SHADER-DB` line, where registers have 16 bits."""
    result = re.search(r"SHADER-DB:.*shader: (.*)", listing)
    if result is None:
        raise Failed("asahi_clc: no SHADER-DB line")
    spilled = re.search(r"(\d+):(\d+) spills", result[1])
    of = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", result[1])}
    if spilled is None or not of.keys() >= {"regs", "threads", "scratch", "inst", "fscib", "ic", "uniforms", "loops"}:
        raise Failed(f"asahi_clc: figures of another form: {result[1]}")
    return Figures(
        registers=-(-of["regs"] // 2),
        threads=of["threads"],
        scratch=of["scratch"],
        spills=int(spilled[1]),
        fills=int(spilled[2]),
        instructions=of["inst"],
        cycles=of["fscib"],
        cycles_integer=of["ic"],
        uniforms=of["uniforms"],
        loops=of["loops"],
        **{f"issue_{kind}": price for kind, price in issue.prices(assembly(listing)).items()},
    )


def assembly(listing: str) -> str:
    """Returns the machine code after register allocation, without the part that runs once for all threads."""
    blocks = re.split(r"\n(?=block0 \{)", listing)
    return next((each for each in blocks if re.search(r"^   r\d+", each, re.MULTILINE)), "")
