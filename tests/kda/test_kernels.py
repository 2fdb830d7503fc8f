"""Compares chunk_kda and chunk_kda_ by every algorithm (the CPU's, the fused chunk and the chunked one) with the
float64 recurrence, and so fused_recurrent_kda: sizes, dtypes, decays where blocks and chunks of tokens meet, gates,
pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.devices import kernels_run, on_a_mac, profiled, ready
from tests.helpers.kda import (
    CHUNKED,
    F32,
    FUSED,
    KERNEL,
    KERNELS,
    Inputs,
    assert_exact_kda,
    inputs_and_options,
    kda_inputs,
)
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.sweep(8)

Way = tuple[str, int]  # algorithm and chunk size; with 0 the kernel chooses the size
WAYS = [("cpu", 0), ("fused_chunk", 8), ("fused_chunk", 16), ("chunked", 16), ("chunked", 32), ("chunked", 64)]
DECODES = [("decode-cpu", 0), ("decode-mps", 0)]  # fused_recurrent_kda


def ways(*names: Way) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", names, ids=[f"{algorithm}-{size}" for algorithm, size in names])


each_way = ways(*WAYS)
all_ways = ways(*WAYS, *DECODES)
most_ways = ways(*WAYS[:3], WAYS[-1], *DECODES)
each_algorithm = pytest.mark.parametrize("algorithm", ["fused_chunk", "chunked"])
everywhere = pytest.mark.parametrize("algorithm", ["cpu", "fused_chunk", "chunked", *(name for name, _ in DECODES)])
only_simulated = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")


def device_of(algorithm: str) -> torch.device:
    return ready("cpu" if algorithm.endswith("cpu") else "mps")


def by(algorithm: str, size: int = 0) -> AbstractContextManager[None]:
    return prefill_algorithm(algorithm, size) if algorithm in KERNELS else nullcontext()


def function_of(algorithm: str) -> str:
    return "fused_recurrent_kda" if algorithm.startswith("decode") else "chunk_kda"


def assert_exact(way: Way, inputs: Inputs, **options: Any) -> None:
    algorithm, size = way
    if algorithm == "chunked" and size:
        options["chunk_size"] = size
    with by(algorithm, size if algorithm == "fused_chunk" else 0):
        assert_exact_kda(function_of(algorithm), inputs, device_of(algorithm), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@most_ways
def test_dtypes(way: Way, dtype: torch.dtype) -> None:
    name, wide = {torch.float32: ("float",) * 2, torch.bfloat16: ("bfloat",) * 2, torch.float16: ("half", "float")}[
        dtype
    ]
    first = {"fused_chunk": f"{FUSED}_{name}_64_{way[1]}_4", "chunked": f"{CHUNKED[0]}_{name}_{wide}_64_48_64"}
    with kernels_run(device_of(way[0]), first.get(way[0], KERNEL)):
        assert_exact(way, kda_inputs(70, 64, 48, B=2, H=2, HV=4, dtype=dtype))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("K", "V"), [(1, 1), (33, 65), (60, 100), (96, 33), (128, 32), (255, 9), (256, 9)])
@each_algorithm
def test_sizes(algorithm: str, K: int, V: int) -> None:
    assert_exact((algorithm, 0), kda_inputs(19 if algorithm == "fused_chunk" else 70, K, V))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("T", [1, 5, 8, 9, 16, 33, 65])
@each_way
def test_lengths(way: Way, T: int) -> None:
    assert_exact(way, kda_inputs(T, 32, 32, B=2))


@each_way
def test_channels_that_forget_beside_others_that_do_not(way: Way) -> None:
    inputs = kda_inputs(65 if way[0] == "fused_chunk" else 130)
    inputs["g"] = -20 * torch.rand_like(inputs["g"])
    inputs["g"][..., ::2] = -1e-3
    assert_exact(way, inputs)


@pytest.mark.parametrize("reset", [-torch.inf, -1e4, -20.0])
@most_ways
def test_resets(way: Way, reset: float) -> None:
    """The decays reset a whole head within 8 tokens, some channels at the first and last token of 8 and of a chunk, and
    a head twice. Tokens after them must keep their digits.
    """
    inputs = kda_inputs(40 if way[0] == "fused_chunk" else 70, 32, 32)
    g = inputs["g"]
    g[:, 11, 0] = g[:, 16, :, ::3] = g[:, 31, :, 1::3] = g[:, 33:35, 1] = reset
    g[:, [0, 7, 8], :, 2::7] = g[:, 63:65, :, 1::5] = reset
    assert_exact(way, inputs)


def repeated_keys(inputs: Inputs, beta: float) -> Inputs:
    key = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    return inputs | {"k": key, "beta": beta * (1 - 0.1 * inputs["beta"]), "g": 0.01 * inputs["g"]}


@each_way
def test_repeated_keys(way: Way) -> None:
    """The inverse of (I + A) grows with beta, and multiplies the errors of A's sums over the channels."""
    assert_exact(way, repeated_keys(kda_inputs(65 if way[0] == "fused_chunk" else 130), 1.9))


@pytest.mark.parametrize(
    ("way", "g", "beta"),
    [(("chunked", 16), -5e-5, 0.0), *((way, -3e-5, 1e-3) for way in (WAYS[0], *WAYS[2:4], WAYS[5]))],
    ids=str,
)
def test_a_state_that_hardly_decays(way: Way, g: float, beta: float) -> None:
    """Over 125 chunks or 250 blocks, a decay that is rounded alike in each is off by 2e-6 to 3e-6 at the end. If each
    of 2,000 small updates were rounded into the state, the error would be 1.2e-6 to 2.4e-6. Kernels sum several first.
    """
    inputs = kda_inputs(2000, 32, 8, HV=1)
    inputs["g"], inputs["beta"] = torch.full_like(inputs["g"], g), beta * inputs["beta"]
    assert_exact(way, inputs)


LONG: dict[str, Callable[[Inputs], Inputs]] = {
    "models' decays": lambda inputs: inputs,
    "from -20": lambda inputs: inputs | {"g": -20 * torch.rand_like(inputs["g"])},
    "at -5": lambda inputs: inputs | {"g": torch.full_like(inputs["g"], -5.0)},
    "repeated keys": lambda inputs: repeated_keys(inputs, 1.0),
}


@pytest.mark.parametrize(
    ("algorithm", "kind"), [*product(("cpu", "decode-cpu"), LONG), ("chunked", "from -20")], ids=str
)
def test_thousands_of_tokens(algorithm: str, kind: str) -> None:
    # The narrowest CPU variant has no fused multiply-add: it rounds an update twice, which shows with repeated keys.
    f32 = F32 * math.sqrt(2) if kind == "repeated keys" else F32
    assert_exact((algorithm, 0), LONG[kind](kda_inputs(4096, 32, 16, HV=1)), f32=f32)


@all_ways
def test_options(way: Way) -> None:
    inputs, options = inputs_and_options(20 if way[0] == "fused_chunk" else 40)
    assert_exact(way, inputs, **options)


@all_ways
def test_packed_and_empty_sequences(way: Way) -> None:
    """Sequences are empty, of one token, shorter than a chunk, and longer."""
    cu_seqlens = torch.tensor([0, 1, 1, 17, 87])
    assert_exact(way, kda_inputs(87, 32, 32, N=4) | {"cu_seqlens": cu_seqlens})


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@everywhere
def test_the_gate_is_in_the_kernel(
    algorithm: str, dtype: torch.dtype, has_bias: bool, lower_bound: float | None
) -> None:
    """Raw gates are between -30 and 30, parameters have any shape, and the fused kernel is one dispatch. A head's bias
    ends where the next one's begins, not at a whole vector.
    """
    inputs = kda_inputs(20, 36, 32)
    inputs["g"] = (30 * (2 * torch.rand_like(inputs["g"]) - 1)).to(dtype)
    options = {"A_log": torch.tensor([-1.0, 0.5]), "use_gate_in_kernel": True, "lower_bound": lower_bound}
    if has_bias:
        options["dt_bias"] = torch.randn(2, 36).to(dtype)
    assert_exact((algorithm, 0), inputs, **options)
    if algorithm == "fused_chunk" and not on_a_mac():
        on_device, options = to_device(inputs, ready("mps")), to_device(options, ready("mps"))
        with profiled() as profile:
            torch.ops.gdn.chunk_kda(**on_device, **options)
        assert [each.dispatches for each in profile.kernels.values()] == [1] and not profile.fallbacks


def test_rows_of_zeros_under_the_norm() -> None:
    inputs = kda_inputs(20, 32, 16)
    inputs["q"][:, 3] = inputs["k"][:, 5] = 0
    inputs["k"] *= 1e-3
    assert_exact(("fused_chunk", 0), inputs, use_qk_l2norm_in_kernel=True)


@only_simulated
@pytest.mark.parametrize(
    ("T", "forced", "kernel"),
    [
        (4, None, KERNEL),
        (5, None, FUSED),
        (40, "recurrent", KERNEL),
        (3, "fused_chunk", FUSED),
    ],
)
def test_which_kernel_runs(T: int, forced: str | None, kernel: str) -> None:
    inputs = to_device(kda_inputs(T, 32, 16), ready("mps"))
    with prefill_algorithm(forced), profiled() as profile:
        torch.ops.gdn.chunk_kda(**inputs)
    assert [name.startswith(f"{kernel}_") for name in profile.kernels] == [True]


@only_simulated
@pytest.mark.parametrize(("tokens", "kernel"), [((7, 0, 5), KERNEL), ((7, 0, 6), FUSED)])
def test_the_mean_length_of_packed_sequences_decides(tokens: tuple[int, ...], kernel: str) -> None:
    cu_seqlens = torch.tensor([0, *tokens]).cumsum(0)
    inputs = to_device(kda_inputs(sum(tokens), 32, 16, N=3) | {"cu_seqlens": cu_seqlens}, ready("mps"))
    with profiled() as profile:
        torch.ops.gdn.chunk_kda(**inputs)
    assert [name.startswith(f"{kernel}_") for name in profile.kernels] == [True]


@only_simulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_byte_comes_and_goes_once_in_whole_lines(dtype: torch.dtype) -> None:
    inputs = kda_inputs(64, 128, 128, dtype=dtype)
    state = inputs["initial_state"].nbytes
    compulsory = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + state
    on_device = to_device(inputs, ready("mps"))
    with profiled(detailed=True) as profile:
        torch.ops.gdn.chunk_kda(**on_device, output_final_state=True)
    (figures,) = profile.kernels.values()
    moved_bytes = figures.device_bytes_distinct_read + figures.device_bytes_distinct_written
    assert compulsory <= moved_bytes <= 1.05 * compulsory
    assert figures.least_cache_lines >= 0.95 * figures.cache_lines
