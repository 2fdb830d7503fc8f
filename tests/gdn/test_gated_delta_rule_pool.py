"""Tests that the in-place end-to-end ops write the functional ops' bits into the slots and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import END_TO_END_OPS, Case, make_case, pool_with_gaps
from tests.helpers.devices import kernels_run, on_a_mac, profiled
from tests.helpers.errors import RECURRENT_F32, assert_close, assert_same_bits
from tests.helpers.prefill import each_op, kernels_of
from torch_gdn_check.registry.cases import IN_PLACE

pytestmark = pytest.mark.sweep(6)

SLOTS = 7
TOKENS = {"chunk_gated_delta_rule": 70, "fused_recurrent_gated_delta_rule": 3}


def paged_pool(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the storage of a paged cache, and its pool [SLOTS, HV, K, V]."""
    return pool_with_gaps(device, dtype, SLOTS, 2, 32, 16)


def call(op: str, case: Case, pool: Tensor, **options: Any) -> Any:
    on_device = case.to(pool.device)
    with kernels_run(pool.device, *kernels_of(op, case, pool.device, **options)):
        return IN_PLACE[op](*on_device.qkv, on_device.g, on_device.beta, pool, cu_seqlens=case.cu_seqlens, **options)


def expected(op: str, case: Case, states: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the functional op's result from these states."""
    on_device = case.to(states.device)
    on_device.initial_state = states
    o, final_state = END_TO_END_OPS[op](*on_device.qkv, **(on_device.options | options))
    assert final_state is not None
    return o, final_state


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("null_index", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_slots(device: torch.device, op: str, null_index: int, dtype: torch.dtype) -> None:
    """Sequence 0 continues in slot 5, 1 has no slot (and NaN inputs), 2 restarts in slot 1, 3 continues in slot 3."""
    case = make_case(TOKENS[op], 32, 16, B=4)
    storage, pool = paged_pool(device, dtype)
    before = storage.clone()
    states = pool[[5, 0, 1, 3]].float()
    states[2] = 0
    o, final_state = expected(op, case, states)
    for x in (*case.qkv, case.g, case.beta):
        x[1] = torch.nan
    indices = torch.tensor([5, null_index, 1, 3], device=device, dtype=torch.int32)
    flags = torch.tensor([True, True, False, True], device=device)
    ours = call(op, case, pool, state_indices=indices, has_initial_state=flags, null_index=null_index)
    assert (ours[1] == 0).all()
    kept = [0, 2, 3]
    assert_same_bits("o", ours[kept], o[kept])
    assert_same_bits("the slots", pool[[5, 1, 3]], final_state[kept].to(dtype))
    others = [0, 2, 4, 6]
    assert_same_bits("the other slots", storage[others], before[others])
    size = pool[0].numel()
    assert_same_bits("what follows a slot", storage[:, size:], before[:, size:])


@each_op("chunked")
def test_without_indices_sequence_n_has_slot_n(device: torch.device, op: str) -> None:
    case = make_case(TOKENS[op], 32, 16, B=2)
    storage, pool = paged_pool(device, torch.float32)
    before = storage.clone()
    o, final_state = expected(op, case, pool[:2].clone())
    assert_same_bits("o", call(op, case, pool), o)
    assert_same_bits("the slots", pool[:2], final_state)
    assert_same_bits("the other slots", storage[2:], before[2:])


@each_op("chunked", "fused_chunk")
def test_packed_and_empty_sequences(device: torch.device, op: str) -> None:
    """One empty sequence has a state, which stays. One has no state, and its slot becomes zeros. One has no slot."""
    case = make_case(20, 32, 16, cu_seqlens=[0, 7, 7, 7, 7, 20])
    _, pool = paged_pool(device, torch.float32)
    before = pool.clone()
    o, final_state = expected(op, case, pool[[6, 2, 0, 0, 4]])
    indices = torch.tensor([6, 2, 3, -1, 4], device=device)
    flags = torch.tensor([True, True, False, True, True], device=device)
    assert_same_bits("o", call(op, case, pool, state_indices=indices, has_initial_state=flags), o)
    assert_same_bits("the slots", pool[[6, 4]], final_state[[0, 4]])
    assert_same_bits("the past", pool[[2, 0, 1, 5]], before[[2, 0, 1, 5]])
    assert (pool[3] == 0).all()


@each_op("chunked")
@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 0]], ids=["batch", "packed"])
def test_without_tokens_only_a_reset_state_changes(device: torch.device, op: str, cu_seqlens: list[int] | None) -> None:
    case = make_case(0, 32, 16, B=2 if cu_seqlens is None else 1, cu_seqlens=cu_seqlens)
    _, pool = paged_pool(device, torch.float32)
    before = pool.clone()
    indices, flags = torch.tensor([3, 4], device=device), torch.tensor([True, False], device=device)
    o = call(op, case, pool, state_indices=indices, has_initial_state=flags)
    assert o.shape == (case.q.shape[0], 0, 2, 16)
    assert (pool[4] == 0).all()
    assert_same_bits("the other slots", pool[[0, 1, 2, 3, 5, 6]], before[[0, 1, 2, 3, 5, 6]])


def assert_close_in_f32(name: str, x: Tensor, expected: Tensor) -> None:
    assert_close(name, x, expected.double(), RECURRENT_F32, head_dim=None)


@each_op("chunked")
def test_state_v_first_and_a_transposed_pool(device: torch.device, op: str) -> None:
    """Slots are [V, K], or [K, V] that lie as [V, K] in memory. Kernels give both the same bits, except that the
    recurrence on the CPU sums along the contiguous dimension.
    """
    same = assert_close_in_f32 if device.type == "cpu" and op.startswith("fused") else assert_same_bits
    case = make_case(TOKENS[op], 32, 16, B=2)
    _, pool = paged_pool(device, torch.float32)
    o, final_state = expected(op, case, pool[:2].clone())
    transposed = pool.transpose(-1, -2).contiguous()
    same("o", call(op, case, transposed, state_v_first=True), o)
    same("the slots", transposed[:2].transpose(-1, -2), final_state)
    transposed = pool.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_same_bits("o", call(op, case, transposed), o)
    assert_same_bits("the slots", transposed[:2], final_state)


@each_op("chunked")
def test_takes_the_options(device: torch.device, op: str) -> None:
    case = make_case(TOKENS[op], 32, 16, B=2, H=1, HV=2, dtype=torch.float16, normal=False)
    options: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": torch.randn(2, device=device), "scale": 0.3}
    options |= {"use_beta_sigmoid_in_kernel": True, "output_dtype": torch.float32, "use_qk_l2norm_in_kernel": True}
    options |= {"dt_bias": torch.randn(2, device=device), "allow_neg_eigval": True, "head_grouping": "tiled"}
    if op.startswith("fused"):
        options["gk"] = -torch.rand(2, 3, 2, 32, device=device)
    _, pool = paged_pool(device, torch.float32)
    o, final_state = expected(op, case, pool[:2].clone(), **options)
    assert_same_bits("o", call(op, case, pool, **options), o)
    assert_same_bits("the slots", pool[:2], final_state)


def test_the_states_between_chunks(device: torch.device) -> None:
    op = "chunk_gated_delta_rule"
    case = make_case(70, 32, 16, B=2)
    _, pool = paged_pool(device, torch.float32)
    on_device = case.to(device)
    on_device.initial_state = pool[[2, 3]]
    h = END_TO_END_OPS[op](*on_device.qkv, **on_device.options, chunk_size=32, return_intermediate_states=True)[2]  # type: ignore[misc]
    indices = torch.tensor([2, -1], device=device)
    _, ours = call(op, case, pool, state_indices=indices, chunk_size=32, return_intermediate_states=True)
    assert_same_bits("h", ours[0], h[0])
    assert (ours[1] == 0).all()


@each_op("chunked", "recurrent", devices=("mps",))
@pytest.mark.parametrize(
    ("indices", "words", "is_token"),
    [
        ([2, 7], "expected indices below the number of slots", False),
        ([2, 2], "expected each slot at most once", False),
        ([2, 7], "expected indices below the number of slots", True),
    ],
)
def test_wrong_indices_on_the_device(
    device: torch.device, op: str, indices: list[int], words: str, is_token: bool
) -> None:
    """A wrong index counts as no slot: o is zeros, the pool is unchanged, and the next synchronisation raises."""
    case = make_case(1 if is_token else TOKENS[op], 32, 16, B=2)
    storage, pool = paged_pool(device, torch.float32)
    before = storage.clone()
    o, final_state = expected(op, case, pool[[2, 2]])
    on_device = case.to(device)
    ours = IN_PLACE[op](*on_device.qkv, on_device.g, on_device.beta, pool, torch.tensor(indices, device=device))
    with pytest.raises(RuntimeError, match=words):
        torch.mps.synchronize()
    assert_same_bits("o", ours[0], o[0])
    assert (ours[1] == 0).all()
    assert_same_bits("the slot", pool[2], final_state[0])
    assert_same_bits("the other slots", storage[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])


@each_op("chunked", devices=("mps",))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_wrong_indices_among_many_on_the_device(device: torch.device, op: str, dtype: torch.dtype) -> None:
    """The kernel locate_slots finds them among more than 32 sequences. -1 and 0 may repeat."""
    case = make_case(1, 8, 4, B=70)
    pool = torch.randn(80, 2, 8, 4, device=device)
    before = pool.clone()
    slots = torch.randperm(79)[:70] + 1
    slots[[3, 69]], slots[40], slots[50], slots[60] = 0, slots[7], 80, slots[7]
    none = [3, 40, 50, 60, 69]
    kept = [n for n in range(70) if n not in none]
    o, final_state = expected(op, case, pool[slots.clamp(max=79).to(device)])
    on_device = case.to(device)
    ours = IN_PLACE[op](*on_device.qkv, on_device.g, on_device.beta, pool, slots.to(device, dtype), null_index=0)
    words = "indices below the number of slots, got 80 at 50|each slot at most once, got [0-9]+ at [46]0"
    with pytest.raises(RuntimeError, match=rf"^{IN_PLACE[op].__name__}: state_indices: expected ({words})\b"):
        torch.mps.synchronize()
    assert_same_bits("o", ours[kept], o[kept])
    assert (ours[none] == 0).all()
    assert_same_bits("the slots", pool[slots[kept].to(device)], final_state[kept])
    others = [n for n in range(80) if n not in set(slots[kept].tolist())]
    assert_same_bits("the other slots", pool[others], before[others])


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
@each_op("chunked", devices=("mps",))
def test_many_indices_are_looked_through_once(device: torch.device, op: str) -> None:
    """The kernel locate_slots searches indices on the device, and the check of arguments searches those on the host."""
    case = make_case(1, 8, 4, B=33)
    on_device, pool = case.to(device), torch.randn(40, 2, 8, 4, device=device)
    slots = torch.randperm(40)[:33]
    o, final_state = expected(op, case, pool[slots.to(device)])
    results = []
    for indices in (slots, slots.to(device)):
        mine = pool.clone()
        with profiled() as profile:
            results.append(IN_PLACE[op](*on_device.qkv, on_device.g, on_device.beta, mine, indices))
        assert profile.launched("locate_slots_4") == (indices.device.type == "mps")
        assert_same_bits("the slots", mine[slots.to(device)], final_state)
    for each in results:
        assert_same_bits("o", each, o)
