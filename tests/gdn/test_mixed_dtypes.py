"""The end-to-end ops with v of another dtype than q and k, as FLA takes it: o has v's dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import kernels_run
from tests.helpers.errors import RECURRENT_F32, RECURRENT_OUTPUT, assert_close, assert_same_bits, chunk_f32
from tests.helpers.prefill import PREFILL, each_device, kernels_of
from torch_gdn import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = [pair for pair in itertools.product(DTYPES, repeat=2) if pair[0] != pair[1]]
each_mix = pytest.mark.parametrize(("of_keys", "of_values"), MIXED, ids=lambda dtype: str(dtype).removeprefix("torch."))


def mixed_case(of_keys: torch.dtype, of_values: torch.dtype, tokens: int) -> Case:
    case = make_case(tokens, 48, 40, B=2, H=1, HV=2)
    case.q, case.k, case.v = case.q.to(of_keys), case.k.to(of_keys), case.v.to(of_values)
    return case


@each_mix
@pytest.mark.parametrize("tokens", [1, 13])
def test_is_the_recurrence_of_what_was_passed(
    device: torch.device, of_keys: torch.dtype, of_values: torch.dtype, tokens: int
) -> None:
    case = mixed_case(of_keys, of_values, tokens)
    there = case.to(device)
    with kernels_run(device, "fused_recurrent_gated_delta_rule"):
        o, state = torch_gdn.fused_recurrent_gated_delta_rule(*there.qkv, **there.options)
    exact = case.exact()
    assert state is not None
    assert o.dtype == of_values and state.dtype == torch.float32
    assert_close("o", o, exact[0], {torch.float32: RECURRENT_F32, **RECURRENT_OUTPUT}[of_values])
    assert_close("final_state", state, exact[1], RECURRENT_F32, head_dim=1)


@each_mix
def test_in_place_has_the_same_bits(device: torch.device, of_keys: torch.dtype, of_values: torch.dtype) -> None:
    there = mixed_case(of_keys, of_values, 3).to(device)
    o, state = torch_gdn.fused_recurrent_gated_delta_rule(*there.qkv, **there.options)
    assert there.initial_state is not None and state is not None
    pool = there.initial_state.clone()
    out = torch.full((2, 3, 2, 43), 7, dtype=of_values, device=device)
    torch_gdn.fused_recurrent_gated_delta_rule_(*there.qkv, there.g, there.beta, pool, out=out[..., :40])
    assert_same_bits("o", out[..., :40], o)
    assert (out[..., 40:] == 7).all()
    assert_same_bits("pool", pool, state)


def test_output_dtype_is_that_of_v_or_float32(device: torch.device) -> None:
    there = mixed_case(torch.bfloat16, torch.float16, 3).to(device)
    options: dict[str, Any] = there.options
    o, _ = torch_gdn.fused_recurrent_gated_delta_rule(*there.qkv, output_dtype=torch.float32, **options)
    rounded, _ = torch_gdn.fused_recurrent_gated_delta_rule(*there.qkv, **options)
    assert o.dtype == torch.float32
    assert_same_bits("o", o.half(), rounded)
    with pytest.raises(ValueError, match="output_dtype: expected float32 or the dtype of v, got bfloat16"):
        torch_gdn.fused_recurrent_gated_delta_rule(*there.qkv, output_dtype=torch.bfloat16, **options)


def test_the_references_return_the_dtype_of_v() -> None:
    case = mixed_case(torch.bfloat16, torch.float16, 3)
    for rule in (reference.fused_recurrent_gated_delta_rule, reference.chunk_gated_delta_rule):
        o, _ = rule(*case.qkv, **case.options)
        assert o.dtype == torch.float16, rule.__name__


@each_device("chunked", "fused_chunk", "recurrent")
@each_mix
def test_chunked_loses_nothing_of_what_was_passed(
    device: torch.device, of_keys: torch.dtype, of_values: torch.dtype
) -> None:
    """In float32 the error is float32's: nothing was rounded to the narrower dtype on the way."""
    case = mixed_case(of_keys, of_values, 70)
    there = case.to(device)
    options: dict[str, Any] = there.options
    with kernels_run(device, *kernels_of(PREFILL, case, device)):
        o, state = torch_gdn.chunk_gated_delta_rule(*there.qkv, output_dtype=torch.float32, **options)
    exact, bound = case.exact(), chunk_f32(case.largest_g_cumsum())
    assert o.dtype == state.dtype == torch.float32
    assert_close("o", o, exact[0], bound)
    assert_close("final_state", state, exact[1], bound, head_dim=1)
    rounded, _ = torch_gdn.chunk_gated_delta_rule(*there.qkv, **options)
    assert_same_bits("o", rounded, o.to(of_values))


@each_mix
def test_chunked_in_place_has_the_same_bits(device: torch.device, of_keys: torch.dtype, of_values: torch.dtype) -> None:
    there = mixed_case(of_keys, of_values, 21).to(device)
    options: dict[str, Any] = there.options
    o, state, h = torch_gdn.chunk_gated_delta_rule(
        *there.qkv, chunk_size=16, return_intermediate_states=True, **options
    )
    assert there.initial_state is not None and state is not None
    assert h.dtype == torch.float32
    pool = there.initial_state.clone()
    out = torch.full((2, 21, 2, 43), 7, dtype=of_values, device=device)
    results = torch_gdn.chunk_gated_delta_rule_(
        *there.qkv, there.g, there.beta, pool, chunk_size=16, return_intermediate_states=True, out=out[..., :40]
    )
    assert_same_bits("o", out[..., :40], o)
    assert (out[..., 40:] == 7).all()
    assert_same_bits("pool", pool, state)
    assert_same_bits("h", results[1], h)


@each_mix
def test_chunked_without_tokens_resets_states(
    device: torch.device, of_keys: torch.dtype, of_values: torch.dtype
) -> None:
    case = mixed_case(of_keys, of_values, 1).to(device)
    assert case.g is not None and case.beta is not None and case.initial_state is not None
    pool, none = case.initial_state.clone(), torch.zeros(2, dtype=torch.bool, device=device)
    q, k, v, g, beta = (x[:, :0] for x in (*case.qkv, case.g, case.beta))
    o = torch_gdn.chunk_gated_delta_rule_(q, k, v, g, beta, pool, has_initial_state=none)
    assert o.dtype == of_values and (pool == 0).all()


@each_mix
def test_fake_outputs_are_as_the_real_ones(of_keys: torch.dtype, of_values: torch.dtype) -> None:
    case = mixed_case(of_keys, of_values, 20)
    call: dict[str, Any] = {"output_final_state": True, "return_intermediate_states": True}
    tensors = (*case.qkv, case.g, case.beta)
    real = torch_gdn.chunk_gated_delta_rule(*tensors, **call)  # type: ignore[arg-type]
    with FakeTensorMode() as mode:
        fake = torch_gdn.chunk_gated_delta_rule(*map(mode.from_tensor, tensors), **call)  # type: ignore[arg-type]
    described = [[(x.dtype, x.shape) for x in outputs if x is not None] for outputs in (fake, real)]
    assert described[0] == described[1] and len(described[0]) == 3


def test_q_and_k_have_one_dtype(device: torch.device) -> None:
    there = make_case(3).to(device)
    with pytest.raises(TypeError, match=r"^fused_recurrent_gated_delta_rule: k: expected dtype float32 like q"):
        torch_gdn.fused_recurrent_gated_delta_rule(there.q, there.k.half(), there.v)
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule: k: expected dtype float32 like q"):
        torch_gdn.chunk_gated_delta_rule(there.q, there.k.half(), there.v, there.g, there.beta)
