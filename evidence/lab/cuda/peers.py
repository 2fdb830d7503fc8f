"""Times other projects' decode kernels on the same GPU, as our decode cases are timed. MLX's Metal kernel comes from
the installed wheel's header, through the same shim. FLA's Triton kernel runs if FLA and torch are installed. We keep no
copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evidence.lab.cuda.compiling import peer_cubin
from evidence.lab.cuda.dialect import translated
from evidence.lab.cuda.gpu import Gpu, Prepared
from evidence.lab.cuda.replay import CACHE_BYTES, FINITE
from evidence.proof.dialects import without_comments

BATCHES = (1, 8, 64)
H, HV, K, V = 16, 32, 128, 128  # as in evidence.lab.cuda.cases.timed_decode
HEADERS = "include/mlx/backend/metal/kernels"
HEADER = "gated_delta_update.h"
MLX_KERNEL = "gated_delta_seq"  # a simdgroup holds a row of S, and a threadgroup has 4

# The kernel needs more than our shaders: 16-bit floats that convert implicitly, and the positions of a grid.
MLX_TYPES = """\
#include <metal_stdlib>
using namespace metal;
struct InputFloat {
  __nv_bfloat16 value;
  METAL_FUNC operator float() const { return __bfloat162float(value); }
  METAL_FUNC explicit InputFloat(float x) : value(__float2bfloat16(x)) {}
};
"""
MLX_PRELUDE = MLX_TYPES + "static constexpr bool save_state = false;\n"
MLX_ENTRY = """
extern "C" __global__ void __launch_bounds__(128) mlx_decode(
    InputFloat* q, InputFloat* k, InputFloat* v, float* state, InputFloat* g, InputFloat* beta, InputFloat* y,
    float* final_state, int tokens) {{
  const uint3 place = {{threadIdx.x % 32u, threadIdx.x / 32u, 0u}};
  const uint3 at = {{place.x, blockIdx.y * 4u + place.y, blockIdx.z}};
  {kernel}<InputFloat, {K}, {V}, {H}, {HV}, 16>(
      q, k, v, state, g, beta, y, final_state, tokens, nullptr, at, place, place.x);
}}
"""


class NotInstalled(RuntimeError):
    """Raised if a peer is not installed."""


@dataclass(frozen=True)
class PeerTime:
    peer: str
    case: str  # one of evidence.lab.cuda.cases.timed
    microseconds: float


def decode_case(batch: int, v_first: bool) -> str:
    return f"decode {'[V, K]' if v_first else '[K, V]'} B {batch}"


def layer_case(batch: int, v_first: bool) -> str:
    return f"a layer's {decode_case(batch, v_first)}"


def linear_case(size: int, rows: int) -> str:
    return f"linear layer of 4 bits, {size} x {size}, {rows} rows"


def experts_case(part: str, tokens: int) -> str:
    return f"{part} of experts of 4 bits, {tokens} tokens"


def versions() -> list[str]:
    """Returns the versions of what is installed, as the wheels name them."""
    result = []
    for package in ("fla-core", "mlx"):
        with contextlib.suppress(PackageNotFoundError):
            result.append(f"{package} {version(package)}")
    return result


def state_bytes(batch: int) -> int:
    return batch * HV * K * V * 4


def copies_of(batch: int) -> int:
    """Returns how many pairs of states, one read and one written, exceed the cache."""
    return max(1, math.ceil(CACHE_BYTES / (2 * state_bytes(batch))))


# ---- MLX -------------------------------------------------------------------------------------------------------------


def mlx_header(name: str) -> str:
    result = importlib.util.find_spec("mlx")
    for folder in (result.submodule_search_locations or ()) if result else ():
        if (header := Path(folder) / HEADERS / name).exists():
            return header.read_text()
    raise NotInstalled("MLX's headers are not installed: pip install 'mlx[cpu]' has them")


def mlx_source(header: str) -> str:
    text = without_comments(header)
    result = re.search(rf"^template <[^>]*>\n\[\[kernel\]\] void {MLX_KERNEL}\(.*?^}}", text, re.MULTILINE | re.DOTALL)
    if not result:
        raise NotInstalled(f"MLX: expected a kernel {MLX_KERNEL}, got a header without it")
    kernel = re.sub(r" \[\[[^\]]*\]\]", "", result[0].replace("[[kernel]] ", "METAL_FUNC "))
    return MLX_PRELUDE + translated(kernel) + MLX_ENTRY.format(kernel=MLX_KERNEL, K=K, V=V, H=H, HV=HV)


def mlx_times(folder: Path, architecture: str) -> list[PeerTime]:
    cubin = peer_cubin(mlx_source(mlx_header(HEADER)), folder, "mlx_decode", architecture)
    gpu = Gpu()
    function = gpu.function(cubin, "mlx_decode")
    return [PeerTime("MLX", decode_case(batch, True), mlx_time(gpu, function, batch)) for batch in BATCHES]


def mlx_time(gpu: Gpu, function: Any, batch: int) -> float:
    heads, state = 2 * batch * HV, state_bytes(batch)
    sizes = (2 * batch * H * K, 2 * batch * H * K, heads * V, state, heads, heads, heads * V, state)
    work, held = [], []
    for _ in range(copies_of(batch)):
        buffers = [gpu.buffer(size) for size in sizes]
        for buffer in buffers:
            buffer.fill(FINITE)
        held += buffers
        arguments = [*(ctypes.c_uint64(buffer.address.value) for buffer in buffers), ctypes.c_int32(1)]
        work.append(Prepared(function, (1, V // 4, batch * HV), 128, arguments, 0))
    whole = gpu.microseconds(work, max(1, 200 // len(work))) / len(work)
    for buffer in held:
        buffer.free()
    return whole


# ---- FLA -------------------------------------------------------------------------------------------------------------


def fla_times() -> list[PeerTime]:
    try:
        import torch
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError as reason:
        raise NotInstalled(f"FLA is not installed: {reason}") from None

    def decode(batch: int, v_first: bool) -> float:
        def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.full(sizes, 0.01, dtype=dtype, device="cuda")

        copies = copies_of(batch)
        q, k, v = draw(batch, 1, H, K), draw(batch, 1, H, K), draw(batch, 1, HV, V)
        g, beta = -draw(batch, 1, HV, dtype=torch.float32), draw(batch, 1, HV, dtype=torch.float32)
        states = [draw(batch, HV, K, V, dtype=torch.float32) for _ in range(copies)]
        kept: list[Any] = []

        def run() -> None:
            for state in states:
                kept.append(
                    fused_recurrent_gated_delta_rule(
                        q, k, v, g, beta=beta, initial_state=state, output_final_state=True, state_v_first=v_first
                    )
                )

        with torch.no_grad():
            return graph_time(run, kept, max(1, 200 // copies)) / copies

    return [
        PeerTime("FLA", decode_case(batch, v_first), decode(batch, v_first))
        for v_first in (False, True)
        for batch in BATCHES
    ]


def graph_time(run: Callable[[], None], kept: list[Any], passes: int) -> float:
    """Times one call of `run`: the median of seven rounds, each of which replays a graph of it `passes` times."""
    import torch

    run()
    torch.cuda.synchronize()
    kept.clear()  # what the graph writes stays in `kept`, so that nothing is written twice
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(passes):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / passes)
    return statistics.median(times[1:])
