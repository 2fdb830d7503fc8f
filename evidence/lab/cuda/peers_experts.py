"""Times MLX's `gather_qmv` for experts of 4 bits on the same GPU. One token chooses each of the experts, so that all
bytes of the weights are read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evidence.lab.cuda.compiling import peer_cubin
from evidence.lab.cuda.gpu import Gpu
from evidence.lab.cuda.peers import PeerTime, experts_case
from evidence.lab.cuda.peers_linear import BITS, GROUP, functions, mlx_time

TOKENS = (1, 4, 8)  # as in evidence.lab.cuda.cases.timed_experts
# Experts per token and their sizes are Qwen3.5-35B-A3B's.
K, D, I = 8, 2048, 512  # noqa: E741
# Gate and up are one launch here, and two in mlx-lm. Offsets are computed with fewer instructions than MLX's.
ENTRY = f"""
extern "C" __global__ void __launch_bounds__(64) gather_qmv_fast(
    unsigned* w, InputFloat* scales, InputFloat* biases, InputFloat* x, unsigned* experts, InputFloat* y, int columns,
    int rows, int pairs_per_vector) {{
  const int pair = blockIdx.z;
  const size_t size = size_t(rows) * columns;
  const size_t expert = experts[pair];
  const uint3 at = {{0u, blockIdx.y, 0u}};
  qmv_fast_impl<InputFloat, {GROUP}, {BITS}>(
      w + expert * size * {BITS} / 32, scales + expert * size / {GROUP}, biases + expert * size / {GROUP},
      x + size_t(pair / pairs_per_vector) * columns, y + size_t(pair) * rows, columns, rows, at, threadIdx.x / 32u,
      threadIdx.x % 32u);
}}
"""


def source() -> str:
    return functions() + ENTRY


def experts_times(folder: Path, architecture: str) -> list[PeerTime]:
    cubin = peer_cubin(source(), folder, "mlx_experts", architecture)
    gpu = Gpu()
    sizes = {"gate and up": (2 * I, D, K), "down": (D, I, 1)}
    return [
        PeerTime("MLX gather_qmv_fast", experts_case(part, tokens), time_of(gpu, cubin, tokens * K, *sizes[part]))
        for part in sizes
        for tokens in TOKENS
    ]


def time_of(gpu: Gpu, cubin: Path, pairs: int, rows: int, columns: int, pairs_per_vector: int) -> float:
    codes = pairs * rows * columns
    scales = 2 * codes // GROUP
    vectors = 2 * pairs // pairs_per_vector * columns
    sizes = (codes * BITS // 8, scales, scales, vectors, 4 * pairs, 2 * pairs * rows)
    contents = {4: np.arange(pairs, dtype=np.int32).tobytes()}
    grid = (1, rows // 8, pairs)
    return mlx_time(gpu, cubin, "gather_qmv_fast", grid, sizes, (columns, rows, pairs_per_vector), contents)
