"""Tests the end-to-end ops with v of another dtype than q and k, as in FLA: o has v's dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_gdn
from tests.helpers.cases import END_TO_END_OPS, Case, make_case, run
from tests.helpers.errors import RECURRENT_F32, assert_close, assert_same_bits, chunk_f32
from tests.helpers.prefill import PREFILL, each_op
from torch_gdn import reference
from torch_gdn_check.registry.cases import IN_PLACE

pytestmark = pytest.mark.sweep(8)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = [pair for pair in itertools.product(DTYPES, repeat=2) if pair[0] != pair[1]]
each_mix = pytest.mark.parametrize(("k_dtype", "v_dtype"), MIXED, ids=lambda dtype: str(dtype).removeprefix("torch."))


def mixed_case(k_dtype: torch.dtype, v_dtype: torch.dtype, tokens: int) -> Case:
    case = make_case(tokens, 48, 40, B=2, H=1, HV=2)
    case.q, case.k, case.v = case.q.to(k_dtype), case.k.to(k_dtype), case.v.to(v_dtype)
    return case


@pytest.mark.parametrize("tokens", [1, 70])
@each_op("chunked", "fused_chunk", "recurrent")
@each_mix
def test_loses_nothing_of_what_was_passed(
    device: torch.device, op: str, k_dtype: torch.dtype, v_dtype: torch.dtype, tokens: int
) -> None:
    """In float32 the error is float32's, so no input was rounded to the narrower dtype on the way."""
    case = mixed_case(k_dtype, v_dtype, tokens)
    o, state = run(op, case, device, output_dtype=torch.float32)
    exact, bound = case.exact(), chunk_f32(case.largest_g_cumsum()) if op == PREFILL else RECURRENT_F32
    assert o.dtype == state.dtype == torch.float32
    assert_close("o", o, exact[0], bound)
    assert_close("final_state", state, exact[1], bound, head_dim=1)
    assert_same_bits("o", run(op, case, device)[0], o.to(v_dtype))


@pytest.mark.parametrize("op", END_TO_END_OPS)
@each_mix
def test_in_place_has_the_same_bits(device: torch.device, op: str, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    on_device = mixed_case(k_dtype, v_dtype, 21).to(device)
    options: dict[str, Any] = {"chunk_size": 16, "return_intermediate_states": True} if op == PREFILL else {}
    o, state, *h = END_TO_END_OPS[op](*on_device.qkv, **on_device.options, **options)
    assert on_device.initial_state is not None and state is not None
    assert [each.dtype for each in h] == [torch.float32] * (op == PREFILL)
    pool = on_device.initial_state.clone()
    out = torch.full((2, 21, 2, 43), 7, dtype=v_dtype, device=device)
    result = IN_PLACE[op](*on_device.qkv, on_device.g, on_device.beta, pool, out=out[..., :40], **options)
    assert_same_bits("o", out[..., :40], o)
    assert (out[..., 40:] == 7).all()
    assert_same_bits("pool", pool, state)
    for each in h:
        assert_same_bits("h", result[1], each)


def test_the_references_return_the_dtype_of_v() -> None:
    case = mixed_case(torch.bfloat16, torch.float16, 3)
    for rule in (reference.fused_recurrent_gated_delta_rule, reference.chunk_gated_delta_rule):
        o, _ = rule(*case.qkv, **case.options)
        assert o.dtype == torch.float16, rule.__name__


@each_mix
def test_chunked_without_tokens_resets_states(device: torch.device, k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    case = mixed_case(k_dtype, v_dtype, 1).to(device)
    assert case.g is not None and case.beta is not None and case.initial_state is not None
    pool, none = case.initial_state.clone(), torch.zeros(2, dtype=torch.bool, device=device)
    q, k, v, g, beta = (x[:, :0] for x in (*case.qkv, case.g, case.beta))
    o = torch_gdn.chunk_gated_delta_rule_(q, k, v, g, beta, pool, has_initial_state=none)
    assert o.dtype == v_dtype and (pool == 0).all()


@each_mix
def test_fake_outputs_are_as_the_real_ones(k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    case = mixed_case(k_dtype, v_dtype, 20)
    call: dict[str, Any] = {"output_final_state": True, "return_intermediate_states": True}
    tensors = (*case.qkv, case.g, case.beta)
    real = torch_gdn.chunk_gated_delta_rule(*tensors, **call)  # type: ignore[arg-type]
    with FakeTensorMode() as mode:
        fake = torch_gdn.chunk_gated_delta_rule(*map(mode.from_tensor, tensors), **call)  # type: ignore[arg-type]
    described = [[(x.dtype, x.shape) for x in outputs if x is not None] for outputs in (fake, real)]
    assert described[0] == described[1] and len(described[0]) == 3
