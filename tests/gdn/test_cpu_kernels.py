"""Tests what only the CPU kernels have: both layouts of a state, work shared among threads, and ISA variants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import torch_gdn
from tests.helpers.cases import END_TO_END_OPS, Case, assert_exact, make_case, run
from tests.helpers.devices import by_threads
from tests.helpers.errors import assert_same_bits

CPU = torch.device("cpu")
CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
# Vectors of 16 cover the rows of some sizes without a remainder (128 and 32 columns of V), and not those of others.
SIZES = [(128, 160), (48, 32), (16, 20), (100, 128), (37, 75)]


def in_layout(case: Case, state_v_first: bool) -> Case:
    """Returns the case, with its initial state as [V, K] if `state_v_first`."""
    assert case.initial_state is not None
    transposed = case.map(lambda x: x)
    if state_v_first:
        transposed.initial_state = case.initial_state.transpose(-1, -2).contiguous()
    return transposed


@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_a_few_tokens_in_both_layouts(op: str, T: int, state_v_first: bool, K: int, V: int) -> None:
    case = make_case(T, K, V, B=2, HV=2)
    case.g[0], case.g[1] = -3.0, -0.01  # decays below and above a half take different code paths
    o, state = run(op, in_layout(case, state_v_first), CPU, state_v_first=state_v_first)
    assert_exact(op, case, (o, state.transpose(-1, -2) if state_v_first else state))


@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_in_place_has_the_bits_of_the_functional_op(state_v_first: bool, K: int, V: int) -> None:
    """Slot 2 continues, slot 0 restarts from zeros, slot 1 is unused. Rows of the pool have gaps of 3 values."""
    case = in_layout(make_case(3, K, V, B=2, HV=2), state_v_first)
    assert case.initial_state is not None
    case.initial_state[1] = 0
    o, state = run(RECURRENT, case, CPU, state_v_first=state_v_first)
    storage = torch.full((3, *state.shape[1:-1], state.shape[-1] + 3), torch.nan)
    pool = storage[..., : state.shape[-1]]
    pool[2] = case.initial_state[0]
    in_place = torch_gdn.fused_recurrent_gated_delta_rule_(
        *case.qkv,
        case.g,
        case.beta,
        state_pool=pool,
        state_indices=torch.tensor([2, 0]),
        has_initial_state=torch.tensor([True, False]),
        state_v_first=state_v_first,
    )
    assert_same_bits("o", in_place, o)
    assert_same_bits("the slots", pool[[2, 0]], state)
    assert storage[1].isnan().all() and storage[..., state.shape[-1] :].isnan().all()


@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_the_final_state_need_not_be_kept(op: str) -> None:
    case = make_case(40, 64, 64)
    without = END_TO_END_OPS[op](*case.qkv, **(case.options | {"output_final_state": False}))
    assert without[1] is None
    assert_same_bits("o", without[0], run(op, case, CPU)[0])


@pytest.mark.parametrize("cu_seqlens", [[0, 3, 3, 7, 8], [0, 3, 3, 70, 71, 75]])
def test_short_sequences_alone_and_among_long_ones(cu_seqlens: list[int]) -> None:
    """The chunked op computes short sequences token by token."""
    case = make_case(cu_seqlens[-1], HV=2, cu_seqlens=cu_seqlens)
    assert_exact(CHUNK, case, run(CHUNK, case, CPU))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 1, 128, 128), (1, 3, 60, 100), (3, 6, 64, 32), (1, 9, 16, 130)])
@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_bits_do_not_depend_on_how_threads_share_the_work(
    op: str, H: int, HV: int, K: int, V: int, dtype: torch.dtype
) -> None:
    """2, 5 and 8 threads divide heads and columns of V into other work items than one thread does."""
    case = make_case(150, K, V, H=H, HV=HV, dtype=dtype, cu_seqlens=[0, 17, 17, 150])
    alone, *results = by_threads(lambda: run(op, case, CPU), 1, 2, 5, 8)
    assert_exact(op, case, alone)
    for each in results:
        for name, ours, expected in zip(("o", "final_state"), each, alone, strict=True):
            assert_same_bits(name, ours, expected)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_between_chunks_are_those_of_shorter_sequences(dtype: torch.dtype, chunk_size: int) -> None:
    """This holds for any number of tokens that the kernels take at a time."""
    case = make_case(150, 40, 72, HV=2, dtype=dtype)
    _, _, h = torch_gdn.chunk_gated_delta_rule(
        *case.qkv, **case.options, chunk_size=chunk_size, return_intermediate_states=True
    )
    for row, tokens in enumerate(range(0, 150, chunk_size)):
        part = case.map(lambda x: x[:, :tokens] if x.shape[1] == 150 else x)  # noqa: B023  called at once
        _, state = run(CHUNK, part, CPU, chunk_size=chunk_size)
        assert_same_bits(f"h[{row}]", h[0, row], state[0].to(dtype))


CHECKS = """
import torch
from tests.helpers.cases import END_TO_END_OPS, assert_exact, make_case, run
from tests.helpers.kda import CHUNK, assert_exact_kda, kda_inputs
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for K, V in ((128, 160), (100, 60), (37, 75), (256, 33)):
        case = make_case(70, K, V, HV=2, dtype=dtype)
        for op in END_TO_END_OPS:
            assert_exact(op, case, run(op, case, torch.device("cpu")))
            transposed = case.map(lambda x: x)
            transposed.initial_state = case.initial_state.transpose(-1, -2).contiguous()
            o, state = run(op, transposed, torch.device("cpu"), state_v_first=True)
            assert_exact(op, case, (o, state.transpose(-1, -2)))
        raw = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "lower_bound": -5.0}
        for options in ({}, raw, raw | {"lower_bound": None}):
            assert_exact_kda(CHUNK, kda_inputs(70, K, V, dtype=dtype), torch.device("cpu"), **options)
repeated = make_case(130, beta=1.9, same_keys=True)
assert_exact("chunk_gated_delta_rule", repeated, run("chunk_gated_delta_rule", repeated, torch.device("cpu")))
"""


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_isa_variant_is_exact(capability: str) -> None:
    """ATEN_CPU_CAPABILITY limits both torch and these kernels."""
    ours = torch.backends.cpu.get_cpu_capability()
    has = {"AVX512": ["avx512", "avx2"], "AVX2": ["avx2"]}.get(ours, [])
    if capability not in ["default", *has]:
        pytest.skip(f"this machine has {ours}")
    result = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
