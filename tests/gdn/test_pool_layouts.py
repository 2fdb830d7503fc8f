"""Tests that in-place ops give the bits of aligned, dense arguments if pools, indices and boundaries lie anywhere."""

from __future__ import annotations

import pytest
import torch

from tests.gdn.test_gated_delta_rule_pool import TOKENS, call, expected, paged_pool
from tests.helpers.cases import make_case
from tests.helpers.errors import assert_same_bits
from tests.helpers.prefill import each_op


@each_op("chunked")
def test_any_number_of_sequences_have_no_slot(device: torch.device, op: str) -> None:
    """The host's check must also know that the null index is no slot."""
    case = make_case(TOKENS[op], 32, 16, B=3)
    _, pool = paged_pool(device, torch.float32)
    before = pool.clone()
    assert not call(op, case, pool, state_indices=torch.tensor([0, 0, -1]), null_index=0).any()
    assert_same_bits("the pool", pool, before)


@each_op("chunked")
def test_many_indices_with_a_stride(device: torch.device, op: str) -> None:
    case = make_case(1, 8, 4, B=33)
    states, slots = torch.randn(40, 2, 8, 4, device=device), torch.randperm(40)[:33].to(device)
    o, final_state = expected(op, case, states[slots])
    assert_same_bits("o", call(op, case, states, state_indices=slots.repeat_interleave(2)[::2]), o)
    assert_same_bits("the slots", states[slots], final_state)


@pytest.mark.parametrize("v_first", [True, False], ids=["keys", "values"])
@each_op("chunked")
def test_slots_without_alignment(device: torch.device, op: str, v_first: bool) -> None:
    """Keys, or values, of a slot are neighbours, but a slot starts at any element."""
    case = make_case(TOKENS[op], 32, 16, B=2)
    rows, columns = (16, 32) if v_first else (32, 16)
    states = torch.randn(2, 2, rows, columns, device=device)
    final_state = states.clone()
    o = call(op, case, final_state, state_v_first=v_first)
    for offset, padding in ((1, 0), (0, 1)):
        size = 2 * 16 * 32 + padding
        whole = torch.zeros(offset + 2 * size, device=device)
        pool = whole.as_strided((2, 2, rows, columns), (size, 512, columns, 1), offset).copy_(states)
        assert_same_bits("o", call(op, case, pool, state_v_first=v_first), o)
        assert_same_bits("the slots", pool, final_state)


@each_op("chunked", "fused_chunk")
def test_boundaries_with_a_stride(device: torch.device, op: str) -> None:
    case = make_case(20, 32, 16, cu_seqlens=[0, 7, 7, 20])
    _, pool = paged_pool(device, torch.float32)
    o, final_state = expected(op, case, pool[:3].clone())
    assert case.cu_seqlens is not None
    case.cu_seqlens = case.cu_seqlens.to(device).repeat_interleave(2)[::2]
    assert_same_bits("o", call(op, case, pool), o)
    assert_same_bits("the slots", pool[:3], final_state)
