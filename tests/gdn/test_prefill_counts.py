"""Compares the simulated device's counts of prefill, for the fused_chunk algorithm and for MLX's kernel.

The counts are for one key head with two value heads of 128 x 128. Qwen3-Next's 16/32 heads have 16 times as much.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils._cpp_embed_headers import embed_headers

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn.tools.prefill import prefill_algorithm

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
TOKENS, SIZE, VALUE_HEADS = 64, 128, 2
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def inputs(dtype: torch.dtype, tokens: int = TOKENS) -> Case:
    return make_case(tokens, SIZE, SIZE, HV=VALUE_HEADS, dtype=dtype)


def compulsory_bytes(case: Case) -> int:
    """Each input is read once, and the output (as large as v) and final state (as large as the initial one) are written
    once.
    """
    assert case.initial_state is not None
    return sum(x.nbytes for x in (*case.qkv, case.g, case.beta, case.v)) + 2 * case.initial_state.nbytes


def read_and_written(figures: Any, kind: str) -> int:
    return int(getattr(figures, f"device_bytes_{kind}_read") + getattr(figures, f"device_bytes_{kind}_written"))


def figures_of_fused(case: Case, *, state_v_first: bool = False) -> Any:
    on_device = case.to(ready("mps"))
    assert on_device.initial_state is not None
    if state_v_first:
        on_device.initial_state = on_device.initial_state.transpose(-1, -2).contiguous()
    with prefill_algorithm("fused_chunk"), profiled(detailed=True) as profile:
        torch_gdn.chunk_gated_delta_rule(*on_device.qkv, **on_device.options, state_v_first=state_v_first)
    (figures,) = profile.kernels.values()
    return figures


def figures_of_mlx(case: Case) -> Any:
    """MLX's simdgroup kernel is launched as MLX does, with the barrier after each chunk whose absence the watch
    reports.
    """
    import mps_simulator

    element = {torch.float32: "float", torch.bfloat16: "bfloat16_t"}[case.dtype]
    kernel = f"gated_delta_fused_chunk<{element}, {SIZE}, {SIZE}, 1, {VALUE_HEADS}, 8>"
    (package,) = importlib.util.find_spec("mlx").submodule_search_locations  # type: ignore[union-attr,misc]
    include = f"{package}/include"
    source = embed_headers(f"{include}/mlx/backend/metal/kernels/gated_delta_update.h", include)
    last_step = "g_ += C * Hv;"
    assert source.count(last_step) == 1, "MLX's kernel has changed: put the barrier in anew"
    source = source.replace(last_step, last_step + " simdgroup_barrier(mem_flags::mem_threadgroup);")
    instance = f'\ntemplate [[host_name("simdgroup")]] [[kernel]] decltype({kernel}) {kernel};\n'
    with mps_simulator.settings(strict=False):
        pipeline = mps_simulator.metal.Library(source + instance).pipeline("simdgroup", constants={})
    assert case.initial_state is not None
    state = case.initial_state.transpose(-1, -2).contiguous()
    taken = [*case.qkv, state, case.g.exp().to(case.dtype), case.beta.to(case.dtype)]
    arguments = [x.to("mps") for x in (*taken, torch.empty_like(case.v), torch.empty_like(state))]
    with mps_simulator.profile(detailed=True) as profile, mps_simulator.metal.encoder() as encoder:
        encoder.set_pipeline(pipeline)
        for index, x in enumerate(arguments):
            encoder.set_buffer(x, index)
        encoder.set_bytes(TOKENS, 8)
        encoder.dispatch_threads((32, SIZE // 8, VALUE_HEADS), (32, 4, 1))
    return profile.kernels["simdgroup"]


@each_dtype
@pytest.mark.parametrize("state_v_first", [False, True], ids=["K first", "V first"])
def test_each_byte_comes_and_goes_once_in_whole_lines(dtype: torch.dtype, state_v_first: bool) -> None:
    case = inputs(dtype)
    figures = figures_of_fused(case, state_v_first=state_v_first)
    assert compulsory_bytes(case) <= read_and_written(figures, "distinct") <= 1.05 * compulsory_bytes(case)
    assert figures.least_cache_lines >= 0.95 * figures.cache_lines


# A threadgroup of chunk_fwd_h takes 32 columns of u, v_new and h. These are a line of float32, but half a line of
# bfloat16.
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("kernel", "dtype", "share"),
    [
        ("chunk_fwd_intra", torch.bfloat16, 0.8),
        ("chunk_fwd_h", torch.bfloat16, 0.8),
        ("chunk_fwd_h", torch.float32, 0.95),
        ("chunk_fwd_o", torch.bfloat16, 0.95),
    ],
    ids=str,
)
def test_kernels_of_the_chunked_algorithm_move_whole_lines(kernel: str, dtype: torch.dtype, share: float) -> None:
    on_device = inputs(dtype).to(ready("mps"))
    with prefill_algorithm("chunked"), profiled(detailed=True) as profile:
        torch_gdn.chunk_gated_delta_rule(*on_device.qkv, **on_device.options)
    (figures,) = (figures for name, figures in profile.kernels.items() if name.startswith(kernel + "_"))
    assert figures.least_cache_lines >= share * figures.cache_lines


@pytest.mark.parametrize(
    ("dtype", "chunk_size", "kilobytes"), [(torch.bfloat16, 16, 6.2), (torch.float32, 8, 10.0)], ids=str
)
def test_a_chunk_has_two_barriers(dtype: torch.dtype, chunk_size: int, kilobytes: float) -> None:
    """One barrier follows the staging, and one the matrices. `kilobytes` per token pass through a threadgroup's memory:
    each simdgroup reads q once and k twice, and half of k once more for the matrices.
    """
    short, long = (figures_of_fused(inputs(dtype, tokens)) for tokens in (TOKENS, 2 * TOKENS))
    tokens = TOKENS * short.threadgroups
    assert long.barriers - short.barriers == 2 * tokens / chunk_size
    traffic = [x.threadgroup_bytes_read + x.threadgroup_bytes_written for x in (short, long)]
    assert traffic[1] - traffic[0] <= 1000 * kilobytes * tokens


@pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="MLX is not installed: pip install 'mlx[cpu]'")
@each_dtype
def test_asks_the_caches_for_less_than_half_of_what_mlx_does(dtype: torch.dtype) -> None:
    """Both use as many threadgroups, but MLX's simdgroups read k four times each and share nothing."""
    case = inputs(dtype)
    ours, theirs = figures_of_fused(case), figures_of_mlx(case)
    assert ours.threadgroups == theirs.threadgroups
    assert read_and_written(theirs, "distinct") >= 0.99 * (compulsory_bytes(case) - case.g.nbytes - case.beta.nbytes)
    assert read_and_written(ours, "issued") < 0.5 * read_and_written(theirs, "issued")
    assert ours.matrix_multiplies < theirs.matrix_multiplies
