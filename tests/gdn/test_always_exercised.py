"""Tests both end-to-end ops, on every device, with the cases in which kernels of this kind have failed.

Each result is compared with the float64 recurrence, as a whole and for each head. On `mps` there are few head sizes and
lengths, and they are small: each new head size compiles its own kernels, and the simulated device runs one thread after
the other. The heuristic gives these prefills the fused chunk algorithm from 16 tokens on; all of them run on the
chunked algorithm too. The recurrent algorithm runs the recurrent op's kernel, so only the cases in which the prefill
passes it something else run on it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import Case, assert_exact, make_case, run
from tests.helpers.errors import assert_same_bits
from tests.helpers.prefill import each_op

pytestmark = pytest.mark.sweep(8)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES_ON_MPS = [(60, 60), (96, 192), (100, 128), (128, 100), (192, 96), (256, 512)]


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_dtypes(device: torch.device, op: str, dtype: torch.dtype, state: bool) -> None:
    case = make_case(100, B=2, dtype=dtype, state=state)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("g", [0.01, 0.0, -1e-3, -20.0, -1e3, -torch.inf])
def test_one_gate_throughout(device: torch.device, op: str, g: float) -> None:
    case = make_case(100)
    case.g = torch.full_like(case.g, g)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("g", [-20.0, -1e3, -torch.inf])
def test_a_strong_gate_among_weak_ones(device: torch.device, op: str, g: float) -> None:
    """Tokens before the gate are lost; tokens after it must keep their digits."""
    case = make_case(100)
    case.g[:, [20, 63, 64, 90]] = g
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("g", [-20.0, -1e3, -torch.inf])
def test_a_reset_leaves_no_trace_of_a_large_state(device: torch.device, op: str, g: float) -> None:
    """S + (exp(g) - 1) S is exact if exp(g) is near 1, but leaves 1e4 roundings of a large S if exp(g) is 0."""
    case = make_case(30)
    assert case.initial_state is not None
    case.initial_state = case.initial_state * 1e4
    case.g[:, 0] = g
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_large_betas(device: torch.device, op: str, beta: float) -> None:
    case = make_case(130, beta=beta)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("beta", [1.0, 1.9])
@pytest.mark.parametrize("decay", [False, True], ids=["no decay", "decay"])
def test_repeated_keys(device: torch.device, op: str, beta: float, decay: bool) -> None:
    case = make_case(130, beta=beta, same_keys=True)
    if not decay:
        case.g = torch.zeros_like(case.g)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_value_heads_per_key_head(device: torch.device, op: str, ratio: int) -> None:
    case = make_case(70, H=2, HV=2 * ratio)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("T", [0, 63, 64, 65])
def test_lengths(device: torch.device, op: str, T: int) -> None:
    case = make_case(T, B=2)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked", "fused_chunk")
def test_a_single_token(device: torch.device, op: str) -> None:
    """One token is shorter than any chunk, so the heuristic takes the recurrent algorithm."""
    case = make_case(1, B=2)
    assert_exact(op, case, run(op, case, device))


@each_op("fused_chunk")
def test_a_long_odd_length(device: torch.device, op: str) -> None:
    """There are few heads, so the heuristic takes the chunked algorithm."""
    case = make_case(1111, HV=1)
    assert_exact(op, case, run(op, case, device))


@each_op()
def test_an_empty_batch(device: torch.device, op: str) -> None:
    case = make_case(20, B=0)
    assert_exact(op, case, run(op, case, device))


@pytest.mark.sweep(8)
@each_op("chunked", "recurrent")
@pytest.mark.parametrize(("K", "V"), SIZES_ON_MPS)
def test_head_sizes(device: torch.device, op: str, K: int, V: int) -> None:
    case = make_case(70, K, V)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 5), (256, 512)])
def test_the_smallest_and_the_largest_heads(device: torch.device, op: str, K: int, V: int) -> None:
    case = make_case(20, K, V)
    assert_exact(op, case, run(op, case, device))


def fused_projection(case: Case, offset: int) -> Case:
    """Returns q, k and v as views of one [B, T, columns] tensor that starts with `offset` columns of NaN."""
    B, T = case.q.shape[:2]
    parts = [x.reshape(B, T, -1) for x in case.qkv]
    fused = torch.cat([torch.full((B, T, offset), torch.nan, dtype=case.dtype), *parts], -1)
    views = fused[..., offset:].split([part.shape[-1] for part in parts], -1)
    q, k, v = (view.view(x.shape) for view, x in zip(views, case.qkv, strict=True))
    return Case(q, k, v, case.g, case.beta, case.initial_state, case.cu_seqlens)


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_views_of_a_fused_projection(device: torch.device, op: str, dtype: torch.dtype, offset: int) -> None:
    """With an odd offset, no row starts where a kernel may load a vector of 4."""
    case = make_case(70, B=2, H=1, HV=2, dtype=dtype)
    moved = fused_projection(case, offset)
    moved = Case(*(strided_copy(x, device) for x in moved.qkv), case.g, case.beta, case.initial_state)
    assert moved.q.stride() == moved.q.stride() and moved.q.storage_offset() == moved.q.storage_offset() == offset
    assert_exact(op, case, run(op, moved, device))


def strided_copy(x: Tensor, device: torch.device) -> Tensor:
    """Copies x to the device with its strides and offset, which .to() need not keep."""
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
    return torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())


@each_op("chunked")
def test_views_of_gates_and_states(device: torch.device, op: str) -> None:
    case = make_case(70, B=2, HV=2)
    assert case.initial_state is not None
    heads_first = [x.transpose(1, 2).contiguous().to(device).transpose(1, 2) for x in (case.g, case.beta)]
    larger = torch.full((2, 3, 64, 70), torch.nan)
    larger[:, 1:, :, 5:69] = case.initial_state
    state = larger.to(device)[:, 1:, :, 5:69]
    moved = Case(case.q, case.k, case.v, *heads_first, initial_state=state)
    assert_exact(op, case, run(op, moved, device))


@each_op("chunked")
def test_one_key_for_the_whole_batch(device: torch.device, op: str) -> None:
    """The key's strides are 0."""
    case = make_case(20, B=2)
    shared = Case(case.q, case.k[:1].expand(2, -1, -1, -1), case.v, case.g, case.beta, case.initial_state)
    assert_exact(op, shared, run(op, shared, device))


@each_op("chunked")
def test_a_last_stride_other_than_one_is_copied_with_one_warning(
    device: torch.device, op: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = make_case(20)
    on_device = case.to(device)
    on_device.v = on_device.v.transpose(-1, -2).contiguous().transpose(-1, -2)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # otherwise a process warns only once
    try:
        result = run(op, on_device, device)
    finally:
        torch.set_warn_always(always)
    assert capfd.readouterr().err.count("v has a last stride of 2 and is copied") == 1
    assert_exact(op, case, result)


CU_SEQLENS = [0, 0, 17, 17, 81, 150, 150]


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["on the cpu", "on the device"])
def test_packed_and_empty_sequences(device: torch.device, op: str, index_dtype: torch.dtype, where: str) -> None:
    case = make_case(150, cu_seqlens=CU_SEQLENS)
    assert case.cu_seqlens is not None and case.initial_state is not None
    case.cu_seqlens = case.cu_seqlens.to(index_dtype)
    on_device = case.to(device)
    if where == "on the device":
        on_device.cu_seqlens = case.cu_seqlens.to(device)
    result = run(op, on_device, device)
    assert_exact(op, case, result)
    empty = [0, 2, 5]
    assert_same_bits("the state of an empty sequence", result[1][empty], case.initial_state[empty])


@each_op("chunked", "fused_chunk", "recurrent", devices=("cpu",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_in_a_batch_has_the_bits_that_it_has_alone(
    device: torch.device, op: str, dtype: torch.dtype
) -> None:
    """The sequences have a few tokens, less than a chunk, and a chunk or more. On `mps` the algorithm is pinned."""
    boundaries = [0, 3, 3, 20, 21, 85, 155]
    case = make_case(155, dtype=dtype, cu_seqlens=boundaries)
    o, state = run(op, case, device)
    for n, (first, last) in enumerate(pairwise(boundaries)):
        alone = case.map(lambda x: x[:, first:last] if x.shape[1] == 155 else x[n : n + 1])  # noqa: B023  called at once
        alone_o, alone_state = run(op, replace(alone, cu_seqlens=None), device)
        assert_same_bits(f"o of sequence {n}", o[:, first:last], alone_o)
        assert_same_bits(f"state of sequence {n}", state[n : n + 1], alone_state)


@each_op("chunked", "fused_chunk")
def test_many_short_sequences(device: torch.device, op: str) -> None:
    """There are more sequences than chunks of tokens, and hundreds of states."""
    cu_seqlens = [0, *torch.arange(1, 201).mul(3).sub(1).tolist()]
    case = make_case(cu_seqlens[-1], 16, 16, HV=2, cu_seqlens=cu_seqlens)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("initial", [False, True], ids=["from nothing", "from a state"])
def test_state_v_first(device: torch.device, op: str, initial: bool) -> None:
    case = make_case(100, 64, 32, B=2, state=initial)
    transposed = case.map(lambda x: x)
    if case.initial_state is not None:
        transposed.initial_state = case.initial_state.transpose(-1, -2).contiguous()
    o, state = run(op, transposed, device, state_v_first=True)
    assert state.shape == (2, 2, 32, 64) and state.is_contiguous()
    assert_exact(op, case, (o, state.transpose(-1, -2)))


@each_op("chunked", "recurrent")
def test_normalises_q_and_k(device: torch.device, op: str) -> None:
    case = make_case(100, normal=False)
    assert_exact(op, case, run(op, case, device, use_qk_l2norm_in_kernel=True), use_qk_l2norm_in_kernel=True)


@each_op("chunked")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_and_betas_of_16_bits(device: torch.device, op: str, dtype: torch.dtype) -> None:
    case = make_case(70)
    case.g, case.beta = case.g.to(dtype), case.beta.to(dtype)
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
def test_large_values_in_half_precision(device: torch.device, op: str) -> None:
    """The state exceeds float16's 65,504 and is read with small queries. Only the outputs may be rounded to float16."""
    case = make_case(70, dtype=torch.float16)
    assert case.initial_state is not None
    case.initial_state = case.initial_state * 3e6
    case.q = (case.q.float() * 1e-3).half()
    case.g = case.g * 0.04
    case.beta = case.beta * 1e-3
    o, state = case.exact()
    assert state.abs().max() > 1e5 and o.abs().max() < 6e4
    assert_exact(op, case, run(op, case, device))


@each_op("chunked")
@pytest.mark.parametrize("repeat", [False, True], ids=["new memory", "used memory"])
def test_same_inputs_same_bits(device: torch.device, op: str, repeat: bool) -> None:
    case = make_case(100, B=2)
    first = run(op, case, device)
    if repeat:
        run(op, make_case(100, B=2, seed=1), device)
    for name, ours, theirs in zip(("o", "final_state"), run(op, case, device), first, strict=True):
        assert_same_bits(name, ours, theirs)


@each_op("chunked")
def test_nan_stays_in_its_row_of_the_batch(device: torch.device, op: str) -> None:
    case = make_case(70, 32, 32, B=3)
    clean_o, clean_state = run(op, case, device)
    poisoned = case.map(torch.clone)
    poisoned.k[1, 3] = torch.nan
    o, state = run(op, poisoned, device)
    assert o[1].isnan().any()
    assert_same_bits("o of other rows", o[[0, 2]], clean_o[[0, 2]])
    assert_same_bits("state of other rows", state[[0, 2]], clean_state[[0, 2]])
