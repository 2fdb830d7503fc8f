"""The recurrent op, beyond what both end-to-end ops share (test_always_exercised.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torch_gdn
from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits

OP = "fused_recurrent_gated_delta_rule"


def test_decoding_token_by_token_has_the_bits_of_one_call(device: torch.device) -> None:
    """A kernel of its own takes one token."""
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


def test_without_g_and_beta_nothing_decays_and_beta_is_one(device: torch.device) -> None:
    case = make_case(20)
    case.g, case.beta = torch.zeros_like(case.g), torch.ones_like(case.beta)
    there = case.to(device)
    with kernels_run(device, OP):
        o, state = torch_gdn.fused_recurrent_gated_delta_rule(
            *there.qkv, initial_state=there.initial_state, output_final_state=True
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
    """From K of 129 on, whichever dimension of the state is the inner one; two tiles of tokens, two of value rows."""
    case = make_case(10, K, 36, B=2, H=1, HV=2)
    there = case
    if v_first:
        assert case.initial_state is not None
        there = replace(case, initial_state=case.initial_state.transpose(-1, -2).contiguous())
    o, state = run(OP, there, device, state_v_first=v_first)
    assert_exact(OP, case, (o, state.transpose(-1, -2) if v_first else state))
