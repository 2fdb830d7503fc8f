"""Tests the prefill op. test_always_exercised.py has what both end-to-end ops share."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits, chunk_f32
from tests.helpers.prefill import each_device, kernels_of

pytestmark = pytest.mark.sweep(4)

OP = "chunk_gated_delta_rule"


@each_device("chunked")
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_the_chunk_size_changes_nothing_but_rounding(device: torch.device, chunk_size: int) -> None:
    case = make_case(100)
    assert_exact(OP, case, run(OP, case, device, chunk_size=chunk_size))


@each_device("chunked")
def test_equals_the_recurrent_op(device: torch.device) -> None:
    case = make_case(100)
    chunked, recurrent = run(OP, case, device), run("fused_recurrent_gated_delta_rule", case, device)
    bound = chunk_f32(case.largest_g_cumsum())
    assert_close("o", chunked[0], recurrent[0].double(), bound)
    assert_close("final_state", chunked[1], recurrent[1].double(), bound, head_dim=1)


@each_device("chunked")
def test_two_calls_go_on_where_the_first_stopped(device: torch.device) -> None:
    case = make_case(100)
    first = make_case(100).map(lambda x: x[:, :37] if x.shape[1] == 100 else x)
    second = make_case(100).map(lambda x: x[:, 37:] if x.shape[1] == 100 else x)
    o_first, state = run(OP, first, device)
    second.initial_state = state
    o_second, state = run(OP, second, device)
    assert_exact(OP, case, (torch.cat([o_first, o_second], 1), state))


@each_device("chunked")
def test_chunk_indices_change_nothing(device: torch.device) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150])
    assert case.cu_seqlens is not None
    indices = torch_gdn.prepare_chunk_indices(case.cu_seqlens)
    for name, ours, theirs in zip(
        ("o", "final_state"), run(OP, case, device, chunk_indices=indices), run(OP, case, device), strict=True
    ):
        assert_same_bits(name, ours, theirs)


@each_device("chunked", "recurrent")
def test_scale(device: torch.device) -> None:
    case = make_case(70)
    assert_exact(OP, case, run(OP, case, device, scale=0.3), scale=0.3)


@each_device("chunked")
@pytest.mark.parametrize("grouping", ["block", "tiled"])
def test_heads_that_share_the_products_of_their_keys(device: torch.device, grouping: str) -> None:
    """If the chunks of the key heads occupy all cores, one threadgroup computes all value heads of a key head."""
    case = make_case(64, 8, 12, B=15, H=2, HV=6)
    options = {"chunk_size": 16, "head_grouping": grouping}
    assert_exact(OP, case, run(OP, case, device, **options), head_grouping=grouping)


@each_device("chunked")
def test_equals_its_stages_one_by_one(device: torch.device) -> None:
    case = make_case(150, 96, 72, H=2, HV=6, cu_seqlens=[0, 17, 17, 81, 150])
    on_device, cu = case.to(device), case.cu_seqlens
    g = torch_gdn.chunk_local_cumsum(on_device.g, cu_seqlens=cu)
    A_inv = torch_gdn.solve_tril(torch_gdn.chunk_scaled_dot_kkt(on_device.k, g, on_device.beta, cu), cu)
    w, u = torch_gdn.recompute_w_u(on_device.k, on_device.v, on_device.beta, A_inv, g, cu)
    states = {"initial_state": on_device.initial_state, "output_final_state": True}
    h, v_new, state = torch_gdn.chunk_fwd_h(on_device.k, w, u, g, cu_seqlens=cu, **states)
    o = torch_gdn.chunk_fwd_o(on_device.q, on_device.k, v_new, h, g, cu_seqlens=cu)
    assert state is not None
    end_to_end_o, end_to_end_state = run(OP, case, device)
    assert_close("o", end_to_end_o, o.cpu().double(), chunk_f32(case.largest_g_cumsum()))
    assert_close("final_state", end_to_end_state, state.cpu().double(), chunk_f32(case.largest_g_cumsum()), head_dim=1)


@each_device("chunked")
def test_is_called_as_transformers_does(device: torch.device) -> None:
    """q, k and v are positional, the rest are keywords, beta has the activations' dtype, and there is no cu_seqlens."""
    case = make_case(70, dtype=torch.bfloat16, normal=False, state=False)
    case.beta = case.beta.bfloat16()
    on_device = case.to(device)
    with kernels_run(device, *kernels_of(OP, case, device)):
        o, state = torch_gdn.chunk_gated_delta_rule(
            on_device.q,
            on_device.k,
            on_device.v,
            g=on_device.g,
            beta=on_device.beta,
            chunk_size=64,
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    assert state is not None
    exact_o, exact_state = case.exact(use_qk_l2norm_in_kernel=True)
    # As in FLA, the normalised q and k may be rounded to bfloat16 before they are used, which doubles the rounding.
    assert_close("o", o, exact_o, 2 * 3.5e-3)
    assert_close("final_state", state, exact_state, 2 * 2.9e-3, head_dim=1)
