"""Times MLX's matrix-vector kernels for 4-bit weights on the same GPU, through the same shim. They come from the
installed wheel's header. We keep no copy.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evidence.lab.cuda.compiling import peer_cubin
from evidence.lab.cuda.dialect import translated
from evidence.lab.cuda.gpu import Gpu, Prepared
from evidence.lab.cuda.peers import MLX_TYPES, NotInstalled, PeerTime, linear_case, mlx_header
from evidence.lab.cuda.replay import CACHE_BYTES, FINITE
from evidence.proof.dialects import without_comments

HEADER = "quantized.h"
SIZES, ROWS = (2048, 4096, 8192), (1, 2, 4, 8)  # as in evidence.lab.cuda.cases.timed_linear
GROUP, BITS = 64, 4
FUNCTIONS = (
    "get_pack_factor",
    "get_bytes_per_pack",
    "load_vector",
    "qdot",
    "dequantize",
    "qmv_fast_impl",
    "qmv_wide_impl",
)
# MLX's functions use these, and our shaders do not.
PRELUDE = """\
static constexpr int SIMD_SIZE = 32;
template <typename T> METAL_FUNC T select(T no, T yes, bool which) { return which ? yes : no; }
template <typename T> METAL_FUNC T simd_shuffle_down(T x, int distance) {
  return __shfl_down_sync(0xffffffffu, x, distance);
}
"""
ENTRY = """
extern "C" __global__ void __launch_bounds__(64) {name}(
    unsigned* w, InputFloat* scales, InputFloat* biases, InputFloat* x, InputFloat* y, int K, int N, int M) {{
  const uint3 at = {{blockIdx.x, blockIdx.y, blockIdx.z}};
  {call};
}}
"""


@dataclass(frozen=True)
class Variant:
    """One of MLX's kernels. With `vectors` of 0 it is qmv_fast, which reads the weights again for each row of x."""

    vectors: int = 0
    lanes: int = 32  # lanes that share a row of the weights

    @property
    def name(self) -> str:
        return f"qmv_wide_{self.vectors}_{self.lanes}" if self.vectors else "qmv_fast"

    @property
    def call(self) -> str:
        at = "at, threadIdx.x / 32u, threadIdx.x % 32u"
        if self.vectors:
            arguments = f"{GROUP}, {BITS}, {self.vectors}, {self.lanes}"
            return f"qmv_wide_impl<InputFloat, {arguments}>(w, scales, biases, x, y, K, N, M, {at})"
        return f"qmv_fast_impl<InputFloat, {GROUP}, {BITS}>(w, scales, biases, x, y, K, N, {at})"

    def threadgroups(self, size: int, rows: int) -> tuple[int, int, int]:
        if self.vectors:
            return (math.ceil(rows / self.vectors), math.ceil(size / (2 * 32 // self.lanes)), 1)
        return (rows, size // 8, 1)


def variants_for(rows: int) -> Iterator[Variant]:
    """Returns all kernels that MLX might choose. The choice depends on the chip, so the fastest one counts."""
    yield Variant()
    if rows > 1:
        vectors = math.ceil(rows / math.ceil(rows / 5))  # at most 5 per threadgroup
        yield from (Variant(vectors, lanes) for lanes in (4, 8, 16, 32))


def functions() -> str:
    """Returns MLX's functions as CUDA, with what they need."""
    text = without_comments(mlx_header(HEADER))
    result = []
    for name in FUNCTIONS:
        function = re.search(
            rf"^template <[^>]*>\n(?:inline|METAL_FUNC)[^;{{}}]*\b{name}\(.*?^}}", text, re.MULTILINE | re.DOTALL
        )
        if not function:
            raise NotInstalled(f"MLX: expected a function {name}, got a header without it")
        result.append(re.sub(r"^inline ", "METAL_FUNC ", function[0], flags=re.MULTILINE))
    kernels = re.sub(r" \[\[[^\]]*\]\]", "", "\n".join(result)).replace("const constant", "constant")
    return MLX_TYPES + PRELUDE + translated(kernels)


def source() -> str:
    variants = {each.name: each for rows in ROWS for each in variants_for(rows)}
    return functions() + "".join(ENTRY.format(name=name, call=each.call) for name, each in variants.items())


def linear_times(folder: Path, architecture: str) -> list[PeerTime]:
    """Times the fastest of MLX's kernels for each size and number of rows."""
    cubin = peer_cubin(source(), folder, "mlx_linear", architecture)
    gpu = Gpu()
    result = []
    for size in SIZES:
        for rows in ROWS:
            times = {each.name: time_of(gpu, cubin, each, size, rows) for each in variants_for(rows)}
            best = min(times, key=lambda name: times[name])
            result.append(PeerTime(f"MLX {best}", linear_case(size, rows), times[best]))
    return result


def time_of(gpu: Gpu, cubin: Path, variant: Variant, size: int, rows: int) -> float:
    vector = 2 * rows * size
    scales = 2 * size * size // GROUP
    sizes = (size * size * BITS // 8, scales, scales, vector, vector)
    return mlx_time(gpu, cubin, variant.name, variant.threadgroups(size, rows), sizes, (size, size, rows))


def mlx_time(
    gpu: Gpu,
    cubin: Path,
    kernel: str,
    threadgroups: tuple[int, int, int],
    sizes: tuple[int, ...],
    numbers: tuple[int, ...],
    contents: Mapping[int, bytes] = MappingProxyType({}),
) -> float:
    """Returns the microseconds of a kernel that takes buffers of these sizes, then numbers. Buffers without contents
    hold small numbers."""
    function: Any = gpu.function(cubin, kernel)
    copies = max(1, math.ceil(CACHE_BYTES / sum(sizes)))
    work, held = [], []
    for _ in range(copies):
        buffers = [gpu.buffer(each) for each in sizes]
        for place, buffer in enumerate(buffers):
            buffer.fill(FINITE)
            if place in contents:
                buffer.write(contents[place])
        held += buffers
        arguments = [ctypes.c_uint64(buffer.address.value) for buffer in buffers]
        work.append(Prepared(function, threadgroups, 64, [*arguments, *(ctypes.c_int32(each) for each in numbers)], 0))
    whole = gpu.microseconds(work, max(1, 200 // copies)) / copies
    for buffer in held:
        buffer.free()
    return whole
