"""Runs the Metal kernels of MLX's Gated DeltaNet in the engine as MLX does. They come from headers in its wheel.

We keep no copy of MLX: the headers are read from the installed package.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._cpp_embed_headers import embed_headers

import mps_simulator
import mps_simulator.metal
from mps_simulator import settings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None, reason="MLX is not installed: pip install 'mlx[cpu]' brings its kernels"
)

HEADS, VALUE_HEADS, SIZE = 1, 2, 128
INSTANTIATIONS = "".join(
    f'template [[host_name("{name}")]] [[kernel]] decltype({function}) {function};\n'
    for name, function in (
        ("sequential", f"gated_delta_seq<float, {SIZE}, {SIZE}, {HEADS}, {VALUE_HEADS}, 16>"),
        ("simdgroup", f"gated_delta_fused_chunk<float, {SIZE}, {SIZE}, {HEADS}, {VALUE_HEADS}, 8>"),
    )
)
SAVE_STATE = 200  # this function constant makes the sequential kernel keep its states


@cache
def library() -> Any:
    (package,) = importlib.util.find_spec("mlx").submodule_search_locations  # type: ignore[union-attr,misc]
    root = Path(package) / "include"
    # Run-time compilation has no include path.
    source = embed_headers(str(root / "mlx/backend/metal/kernels/gated_delta_update.h"), str(root))
    with settings(strict=False):
        return mps_simulator.metal.Library(source + "\n" + INSTANTIATIONS)


def inputs(tokens: int) -> list[torch.Tensor]:
    """Returns q, k, v, decay (not its logarithm), beta, state."""
    q, k = (torch.nn.functional.normalize(torch.randn(1, tokens, HEADS, SIZE), dim=-1) for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, SIZE)
    decay, beta = torch.exp(-torch.rand(1, tokens, VALUE_HEADS)), torch.rand(1, tokens, VALUE_HEADS)
    return [q, k, v, decay, beta, 0.1 * torch.randn(1, VALUE_HEADS, SIZE, SIZE)]


def in_mlx(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    import mlx.core as mx
    import numpy as np

    with mx.stream(mx.cpu):
        q, k, v, decay, beta, state = (mx.array(a.numpy()) for a in arguments)
        results = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        return tuple(torch.from_numpy(np.array(result)) for result in results)


def in_the_engine(kernel: str, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    q, k, v, decay, beta, state = (a.to("mps") for a in arguments)
    tokens = q.shape[1]
    y, final = torch.empty(v.shape, device="mps"), torch.empty(state.shape, device="mps")
    constants = {SAVE_STATE: False} if kernel == "sequential" else {}
    pipeline = library().pipeline(kernel, constants=constants)
    rows = SIZE if kernel == "sequential" else SIZE // 8  # a simdgroup holds one row of the state, or eight
    with mps_simulator.metal.encoder() as encoder:
        encoder.set_pipeline(pipeline)
        for index, tensor in enumerate((q, k, v, state, decay, beta, y, final)):
            encoder.set_buffer(tensor, index)
        encoder.set_bytes(tokens, 8)
        encoder.dispatch_threads((32, rows, VALUE_HEADS), (32, 4, 1))
    return y.cpu(), final.cpu()


@pytest.mark.parametrize("tokens", [1, 7, 33, 64])
@pytest.mark.parametrize("kernel", ["sequential", "simdgroup"])
def test_mlx_kernels_agree_with_mlx(kernel: str, tokens: int) -> None:
    arguments = inputs(tokens)
    library()
    # MLX's simdgroup kernel overwrites a chunk's gates without a barrier after their last use. Lanes in lockstep
    # forgive that, but the watch does not (see below). For the same reason the order of lanes stays ascending.
    with settings(watch=kernel == "sequential"):
        got = in_the_engine(kernel, arguments)
    for name, result, expected in zip(("y", "state"), got, in_mlx(arguments), strict=True):
        for head in range(VALUE_HEADS):
            axis = 2 if name == "y" else 1
            a, b = result.select(axis, head).double(), expected.select(axis, head).double()
            assert ((a - b).norm() / b.norm()).item() < 1e-6, f"{name}, head {head}"


def test_the_watch_finds_the_race_in_mlx_simdgroup_kernel() -> None:
    arguments = inputs(33)
    library()
    with settings(watch=True), pytest.raises(mps_simulator.Fault, match="data race at threadgroup array 'gamma_all'"):
        in_the_engine("simdgroup", arguments)
