"""Compares the references in float64 with each other, and with what others compute."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

from tests.helpers.cases import Case, make_case
from tests.helpers.errors import assert_close, relative_error
from torch_gdn import reference

EXACT = 1e-12


def double_case(T: int, **options: object) -> Case:
    return make_case(T, 24, 40, B=2, H=2, HV=4, **options).map(torch.Tensor.double)  # type: ignore[arg-type]


@pytest.mark.parametrize("T", [1, 64, 100])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("state", [False, True])
def test_chunked_equals_recurrent(T: int, chunk_size: int, state: bool) -> None:
    case = double_case(T, state=state)
    ours = reference.chunk_gated_delta_rule(*case.qkv, **case.options, chunk_size=chunk_size)
    exact = case.exact()
    assert ours[1] is not None
    assert_close("o", ours[0], exact[0], EXACT)
    assert_close("final_state", ours[1], exact[1], EXACT, head_dim=1)


def test_chunked_equals_recurrent_with_the_options() -> None:
    case = double_case(70, normal=False)
    options = {"use_qk_l2norm_in_kernel": True, "scale": 0.3}
    ours = reference.chunk_gated_delta_rule(*case.qkv, **case.options, **options)
    assert_close("o", ours[0], case.exact(**options)[0], EXACT)


def test_chunked_equals_recurrent_on_packed_sequences() -> None:
    case = make_case(150, 24, 40, cu_seqlens=[0, 17, 17, 81, 150]).map(torch.Tensor.double)
    ours = reference.chunk_gated_delta_rule(*case.qkv, **case.options)
    exact = case.exact()
    assert ours[1] is not None
    assert_close("o", ours[0], exact[0], EXACT)
    assert_close("final_state", ours[1], exact[1], EXACT, head_dim=1)


def test_packed_sequences_are_the_sequences_alone() -> None:
    case = make_case(100, 24, 40, cu_seqlens=[0, 30, 100]).map(torch.Tensor.double)
    o, state = case.exact()
    assert case.initial_state is not None
    for n, (first, last) in enumerate([(0, 30), (30, 100)]):
        q, k, v, g, beta = (x[:, first:last] for x in (*case.qkv, case.g, case.beta))
        alone = Case(q, k, v, g, beta, case.initial_state[n : n + 1]).exact()
        assert_close("o", o[:, first:last], alone[0], EXACT)
        assert_close("final_state", state[n : n + 1], alone[1], EXACT, head_dim=1)


def test_state_v_first_transposes_the_states() -> None:
    case = double_case(70)
    o, state = case.exact()
    assert case.initial_state is not None
    case.initial_state = case.initial_state.transpose(-1, -2)
    for op in (reference.fused_recurrent_gated_delta_rule, reference.chunk_gated_delta_rule):
        turned_o, turned_state = op(*case.qkv, **case.options, state_v_first=True)
        assert turned_state is not None
        assert_close("o", turned_o, o, EXACT)
        assert_close("final_state", turned_state.transpose(-1, -2), state, EXACT, head_dim=1)


def test_one_token_by_hand() -> None:
    """First decay, then read, write, output: S = 2 becomes 1, u = 0.5 (4 - 1 * 3), S = 1 + 3 * 0.5, o = 5 * 2.5."""
    one = {"q": 5.0, "k": 3.0, "v": 4.0, "g": 0.5, "beta": 0.5}
    q, k, v = (torch.full((1, 1, 1, 1), one[name], dtype=torch.float64) for name in "qkv")
    g = torch.full((1, 1, 1), one["g"], dtype=torch.float64).log()
    beta = torch.full((1, 1, 1), one["beta"], dtype=torch.float64)
    state = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)
    o, final = reference.fused_recurrent_gated_delta_rule(q, k, v, g, beta, 1.0, state, output_final_state=True)
    assert final is not None
    assert final.item() == pytest.approx(1 + 3 * 0.5 * (4 - 3))
    assert o.item() == pytest.approx(5 * final.item())


def test_solve_tril_is_the_inverse() -> None:
    case = double_case(100)
    g = reference.chunk_local_cumsum(case.g)
    A = reference.chunk_scaled_dot_kkt(case.k, g, case.beta)
    inverse = reference.solve_tril(A)
    identity = torch.eye(64, dtype=torch.float64)
    for head in range(4):
        product = (A[0, :64, head] + identity) @ inverse[0, :64, head]
        assert relative_error(product, identity) < EXACT


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_equals_transformers_fallback(op: str, l2norm: bool) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    theirs = {"chunk": qwen.torch_chunk_gated_delta_rule, "recurrent": qwen.torch_recurrent_gated_delta_rule}[op]
    case = make_case(100, 64, 32, B=2, H=2, HV=4, normal=not l2norm)
    o, state = theirs(
        *case.qkv,
        g=case.g,
        beta=case.beta,
        initial_state=case.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
    )
    exact = case.exact(use_qk_l2norm_in_kernel=l2norm)
    assert_close("o", o, exact[0], 2e-6)
    assert_close("final_state", state, exact[1], 2e-6, head_dim=1)


@pytest.mark.skipif(sys.platform != "linux", reason="mlx is installed for the tests on Linux alone")
def test_equals_mlx() -> None:
    import mlx.core as mx

    case = make_case(100, 128, 128, B=2, H=2, HV=4)
    assert case.initial_state is not None
    q, k, v, decay, beta = (mx.array(x.numpy()) for x in (*case.qkv, case.g.exp(), case.beta))
    state = mx.array(case.initial_state.transpose(-1, -2).contiguous().numpy())
    o, final = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
    exact = case.exact(scale=1.0)
    assert_close("o", torch.from_numpy(numpy.array(o)), exact[0], 2e-6)
    transposed = torch.from_numpy(numpy.array(final)).transpose(-1, -2)
    assert_close("final_state", transposed, exact[1], 2e-6, head_dim=1)
