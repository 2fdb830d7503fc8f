"""Turns a shader's Metal text into CUDA: address spaces, attributes, the entry point. Lines stay where they are, so
that tools name the shader's own file and line. `shim/metal_stdlib` does everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from evidence.proof.dialects import KernelTemplate, find_kernel, without_comments

SHARED = re.compile(r"^(\s*)(?:alignas\((\d+)\) )?threadgroup ([\w:<>, ]+ \w+(?:\[[^;\n]*\])?;)", re.MULTILINE)
ATTRIBUTES = {
    "threadgroup_position_in_grid": "blockIdx",
    "threadgroups_per_grid": "uint3{gridDim.x, gridDim.y, gridDim.z}",
    "thread_index_in_threadgroup": "threadIdx.x",
    "thread_index_in_simdgroup": "threadIdx.x % 32u",
    "simdgroup_index_in_threadgroup": "threadIdx.x / 32u",
}


class UnknownMetal(ValueError):
    """Raised if the dialect cannot translate this text yet."""


def translated(text: str) -> str:
    text = SHARED.sub(lambda m: f"{m[1]}__shared__ {f'__align__({m[2]}) ' if m[2] else ''}{m[3]}", text)
    text = re.sub(r"\[\[kernel(?:, [^\]]*)?\]\]", "METAL_FUNC", text)
    text = re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", text)
    text = re.sub(r"\bconstant (?=(static|constexpr|const)\b)", "", text)
    text = re.sub(r"\bconstant (?=[\w:]+ ?[&*])", "const ", text)
    text = re.sub(r"\b(device|threadgroup|thread) (?=\w)", "", text)
    text = re.sub(r"\buint3\(", "make_uint3(", text)  # CUDA's has no constructor
    return text.replace('_Pragma("clang loop unroll(full)")', '_Pragma("unroll")')


RESIDENT_THREADS = 512  # per multiprocessor, a limit for registers; a core of Apple's holds no more


def entry(name: str, kernel: KernelTemplate, arguments: Sequence[str], threads: int) -> str:
    """Returns a __global__ function that calls the kernel. It takes buffers and parameter blocks in their bindings'
    order. Buffers do not alias, as on Metal. The call goes through a pointer: an argument that is left to its default
    would be deduced from the buffers otherwise.
    """
    actual = []
    for each in kernel.parameters:
        if each.attribute == "buffer":
            own = f"b{each.binding}"
            actual.append(own if each.is_block else f"metal::BoundBuffer{{{own}}}")
        elif each.attribute in ATTRIBUTES:
            actual.append(ATTRIBUTES[each.attribute])
        else:
            raise UnknownMetal(
                f"{kernel.name}: {each.name}: expected one of {', '.join(ATTRIBUTES)}, got {each.attribute}"
            )
    formal = [
        f"const __grid_constant__ {each.value_type} b{each.binding}"
        if each.is_block
        else f"void* __restrict__ b{each.binding}"
        for each in kernel.buffers
    ]
    template = f"<{', '.join(arguments)}>" if arguments else ""
    bounds = f"{threads}, {max(1, RESIDENT_THREADS // threads)}"
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) {name}({", ".join(formal)})'
    return f"{head} {{\n  constexpr auto called = &{kernel.name}{template};\n  called({', '.join(actual)});\n}}\n"


def cuda_source(text: str, name: str, kernel: str, arguments: Sequence[str], threads: int) -> str:
    """`text` is the shader's file with its includes in place (evidence.proof.metal.front_end.shader_text)."""
    text = without_comments(text)
    return f'{translated(text)}\n#line 1 "entry"\n{entry(name, find_kernel(text, kernel), arguments, threads)}'
