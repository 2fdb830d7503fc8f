"""Tests the recurrent op. test_always_exercised.py has what both end-to-end ops share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import torch_gdn
from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits

pytestmark = pytest.mark.sweep(6)

OP = "fused_recurrent_gated_delta_rule"


def test_decoding_token_by_token_has_the_bits_of_one_call(device: torch.device) -> None:
    """A call with one token runs another kernel."""
    case = make_case(5, B=2, H=2, HV=4)
    o, state = run(OP, case, device)
    outputs = []
    rest = make_case(5, B=2, H=2, HV=4)
    for t in range(5):
        token = rest.map(lambda x: x[:, t : t + 1] if x.shape[1] == 5 else x)  # noqa: B023  called at once
        with kernels_run(device, f"{OP}_token"):
            token_o, rest.initial_state = run(OP, token, device)
        outputs.append(token_o)
    assert_same_bits("o", torch.cat(outputs, 1), o)
    assert rest.initial_state is not None
    assert_same_bits("final_state", rest.initial_state, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K, v_first", [(128, True), (33, True), (60, False)])
def test_one_token_has_the_bits_of_a_packed_one(
    device: torch.device, K: int, v_first: bool, dtype: torch.dtype
) -> None:
    """The call has slots, null slots, slots to reset, raw gates, the norm, and gaps between rows of q, k, v and o."""
    N, H, HV, V = 4, 2, 4, 40
    torch.manual_seed(0)
    q, k = torch.randn(2, N, 1, H, K + 1).to(device, torch.bfloat16)[..., :K]
    v = torch.randn(N, 1, HV, V + 3).to(device, torch.bfloat16)[..., 1 : V + 1]
    g, beta = torch.randn(2, N, 1, HV).to(device, torch.float16)
    pool = torch.randn(6, HV, *((V, K) if v_first else (K, V))).to(device, dtype)
    gates = {"A_log": torch.randn(HV).to(device), "dt_bias": torch.randn(HV).to(device)}
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, **gates}
    slots = {"state_indices": torch.tensor([5, 0, 1, 3]).to(device), "null_index": 0}
    slots["has_initial_state"] = torch.tensor([True, True, False, True]).to(device)
    result, out = pool.clone(), torch.full((N, 1, HV, V + 2), 7.0).to(device, torch.bfloat16)[..., :V]
    decode = partial(torch_gdn.fused_recurrent_gated_delta_rule_, state_v_first=v_first, **slots, **options)
    with kernels_run(device, f"{OP}_token"):
        decode(q, k, v, g, beta, result, out=out)
    packed = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    expected = decode(*packed, pool, cu_seqlens=torch.arange(N + 1).to(device))
    assert_same_bits("o", out, expected.transpose(0, 1))
    assert_same_bits("pool", result, pool)


def test_without_g_and_beta_nothing_decays_and_beta_is_one(device: torch.device) -> None:
    case = make_case(20)
    case.g, case.beta = torch.zeros_like(case.g), torch.ones_like(case.beta)
    on_device = case.to(device)
    with kernels_run(device, OP):
        o, state = torch_gdn.fused_recurrent_gated_delta_rule(
            *on_device.qkv, initial_state=on_device.initial_state, output_final_state=True
        )
    assert state is not None
    assert_exact(OP, case, (o.cpu(), state.cpu()))


def test_scale(device: torch.device) -> None:
    case = make_case(20)
    assert_exact(OP, case, run(OP, case, device, scale=0.3), scale=0.3)


def test_the_rounding_of_a_weak_decay_does_not_add_up(device: torch.device) -> None:
    """exp(-1e-3) is rounded the same way each time: 300 times 3e-8 is 9e-7, where the rest of the op has 2.5e-7."""
    case = make_case(300)
    case.g = torch.full_like(case.g, -1e-3)
    o, state = run(OP, case, device)
    exact = case.exact()
    assert_close("o", o, exact[0], 4e-7)
    assert_close("final_state", state, exact[1], 4e-7, head_dim=1)


@pytest.mark.parametrize("K", [129, 192, 255, 256])
@pytest.mark.parametrize("v_first", [False, True])
def test_rows_that_sixteen_lanes_share(device: torch.device, K: int, v_first: bool) -> None:
    """16 lanes share a row from K = 129 on, in both layouts of the state. There are two tiles of tokens and two of
    value rows.
    """
    case = make_case(10, K, 36, B=2, H=1, HV=2)
    laid_out = case
    if v_first:
        assert case.initial_state is not None
        laid_out = replace(case, initial_state=case.initial_state.transpose(-1, -2).contiguous())
    o, state = run(OP, laid_out, device, state_v_first=v_first)
    assert_exact(OP, case, (o, state.transpose(-1, -2) if v_first else state))
