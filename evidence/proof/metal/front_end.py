"""Turns Metal source into clang's C++ for OpenCL with Metal's address spaces, and returns clang's tree. Warnings are
errors.

The translation and the declarations of Metal's library are those of the simulated device (mps_simulator/engine), so
what is checked here is what runs there. This front end adds what only a reader of the source can tell: it asks clang
for every warning, and for the syntax tree with all templates instantiated, on which rules.py and flow.py work.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.proof.mac.wheels import cache_directory, locked
from evidence.proof.reasons import Unavailable

CHECKOUT = Path(__file__).resolve().parents[3]
SIMULATOR = CHECKOUT / "mps_simulator" / "src" / "mps_simulator"
ENGINE = SIMULATOR / "engine"
COMPILE = ENGINE / "compile"
SHADERS = CHECKOUT / "shaders"
CLANG = "clang++-19"
TRANSLATE = Path(__file__).with_name("translate.cpp")

# Apple's compiler defines these for language version 3.1, which csrc/metal/library.mm asks for.
DEFINES = (
    "-D__METAL__=1",
    "-D__METAL_MACOS__=1",
    "-D__METAL_VERSION__=310",
    "-D__HAVE_BFLOAT__=1",
    "-D__HAVE_SIMDGROUP_MATRIX__=1",
    "-D__cplusplus=201402L",
)
LANGUAGE = ("-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-cl-single-precision-constant")
WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    # Metal 3.1 is C++14, and clang's C++ for OpenCL is C++17. The translation lets `if constexpr` alone through.
    "-Werror=pre-c++17-compat",
    "-Wshorten-64-to-32",
    # The translation writes `constant` as `const __global`, so `constant const char*` has two consts.
    "-Wno-duplicate-decl-specifier",
    # A macro in engine/compile/metal/library/vector.h does not use its typedef for every operator.
    "-Wno-unused-local-typedef",
)
MAX_THREADS = 1024  # per threadgroup, on all of Apple's GPUs that have Metal 3 (Metal Feature Set Tables)
NAMESPACE = "program_metal"  # encloses the program, so that clang prints only its tree
UNNAMED = "program"  # the file of a source without #line


class Refused(Exception):
    """Raised with the front end's messages about a source, each with file and line."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = list(messages)


@dataclass(frozen=True)
class Tools:
    translate: Path
    prelude: Path


def _translation() -> list[Path]:
    """Returns the part of the engine that translates: source_transform.cpp and what it includes, directly or not."""
    result, open_ = [COMPILE / "source_transform.cpp"], ["source_transform.cpp"]
    while open_:
        for name in re.findall(r'#include "(\w+)\.h"', (COMPILE / open_.pop()).read_text()):
            source = COMPILE / f"{name}.cpp"
            if source.exists() and source not in result:
                result.append(source)
                open_ += [source.name, f"{name}.h"]
    return result


def _key() -> str:
    digest = hashlib.sha256(subprocess.run([CLANG, "--version"], capture_output=True, check=True).stdout)
    library = (path for path in (COMPILE / "metal").rglob("*") if path.is_file())
    for path in sorted([TRANSLATE, *_translation(), *ENGINE.rglob("*.h"), *library]):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: Sequence[str], source: str | None = None) -> str:
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    if result.returncode:
        raise Refused(in_metal_terms(result.stderr) or ["clang failed without a message"])
    return result.stdout


def _build(output: Path, command: Sequence[str]) -> None:
    unfinished = output.with_suffix(".unfinished")
    result = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    unfinished.rename(output)


@functools.cache
def tools() -> Tools:
    """Returns the translation as a program and the library's declarations as a precompiled header. Rebuilds them on
    changes.
    """
    if shutil.which(CLANG) is None:
        raise Unavailable(f"{CLANG} is missing: apt-get install clang-19")
    directory = cache_directory() / "strict" / _key()
    translate, prelude = directory / "translate", directory / "prelude.pch"
    with locked(directory):
        if not translate.exists():
            sources = map(str, (TRANSLATE, *_translation()))
            _build(translate, [CLANG, "-std=c++20", "-O1", f"-I{SIMULATOR.parent}", *sources])
        if not prelude.exists():
            library = COMPILE / "metal" / "library"
            command = [CLANG, "-x", "cl-header", *LANGUAGE, "-w", "-Xclang", "-fno-pch-timestamp"]
            _build(prelude, [*command, "-isystem", f"{library}/host", f"{library}/prelude.h"])
    return Tools(translate, prelude)


# The words of clang and of the translation, and Metal's words for them.
METAL_TERMS = (
    ("__attribute__((opencl_global_device))", "threadgroup"),
    ("__global_device", "threadgroup"),
    ("const __global", "constant"),
    ("__global", "constant"),
    ("__local", "device"),
    ("__private", "thread"),
    (f"{NAMESPACE}::", ""),
)


def metal_terms(text: str) -> str:
    for word, metal in METAL_TERMS:
        text = text.replace(word, metal)
    return text


def in_metal_terms(errors: str) -> list[str]:
    """Returns the messages in clang's output, without quoted source and summary."""
    lines = (
        line for line in errors.splitlines() if re.match(r"[^\s].*?:\d+:\d+: (fatal )?(error|warning|note):", line)
    )
    return [metal_terms(line).replace("[-Werror,", "[") for line in lines] or errors.strip().splitlines()


def shader_text(file: str, seen: set[str] | None = None) -> str:
    """Returns what csrc/launch/shader_source.cpp makes of a shader, without its first line and the one that
    instantiates.
    """
    seen = set() if seen is None else seen
    if file in seen:
        return ""
    seen.add(file)
    text = f'#line 1 "{file}"\n'
    for number, line in enumerate((SHADERS / file).read_text().splitlines(), 1):
        if included := re.match(r'#include "([^"]+)"', line):
            text += shader_text(included[1], seen) + f'#line {number + 1} "{file}"\n'
        elif line != "#pragma once":
            text += line + "\n"
    return text


def instantiation(kernel: str, arguments: Sequence[str]) -> str:
    """Returns the line that the host appends."""
    instance = f"{kernel}<{', '.join(arguments)}>"
    name = "_".join((kernel, *arguments))
    return f'template [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'


def preprocess(source: str, include: Sequence[Path] = ()) -> str:
    command = [CLANG, "-E", "-x", "c++", "-std=c++14", "-undef", "-nostdinc", "-w", f"-I{COMPILE / 'metal'}"]
    return _run([*command, *(f"-I{path}" for path in include), *DEFINES, "-"], source)


def translate(source: str, include: Sequence[Path] = ()) -> str:
    """Returns Metal source in clang's C++ for OpenCL. Raises Refused for what Metal lacks."""
    return _run([str(tools().translate)], preprocess(source, include))


def check_others(source: str, include: Sequence[Path] = ()) -> None:
    """Checks other projects' Metal, which may be C++17 and may warn. Raises Refused with clang's errors."""
    translated = translate(source, include)
    _run([CLANG, "-x", "cl", *LANGUAGE, "-w", "-fsyntax-only", "-include-pch", str(tools().prelude), "-"], translated)


def compile_strictly(source: str) -> tuple[str, str]:
    """Returns the translated program and clang's tree of it as JSON. Raises Refused for errors and for warnings."""
    translated = translate(f'namespace {NAMESPACE} {{\n#line 1 "{UNNAMED}"\n{source}}}\n')
    # The translation's own entry to a kernel may need neither buffers nor positions.
    for parameter in ("void* const* a", "const ::simulator_thread* t"):
        translated = translated.replace(parameter, f"{parameter} __attribute__((unused))")
    # Section 5.1.3 of Metal's specification: a kernel that asks for more threads than the device has makes no pipeline.
    translated = re.sub(
        r"static constexpr ::uint (simulator_limit_\d+) = [^;]*;",
        rf'\g<0> static_assert(\1 <= {MAX_THREADS}, "a threadgroup has at most {MAX_THREADS} threads");',
        translated,
    )
    command = [CLANG, "-x", "cl", *LANGUAGE, *WARNINGS, "-fsyntax-only", "-include-pch", str(tools().prelude)]
    command += ["-Xclang", "-ast-dump=json", "-Xclang", f"-ast-dump-filter={NAMESPACE}", "-"]
    return translated, _run(command, translated)
