"""Tests fused_recurrent_kda_: states in a pool, the functional form's bits, rollback to an accepted token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_same_bits
from tests.helpers.kda import KERNEL, kda_inputs
from torch_gdn.testing.inputs import to_device

GATE: dict[str, Any] = {"use_gate_in_kernel": True, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True}


def pool_inputs(T: int, B: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the inputs, and a pool of 8 slots."""
    inputs = to_device(kda_inputs(T, 32, 16, B=B), device)
    del inputs["initial_state"]
    return inputs, torch.randn(8, 2, 32, 16).to(device)


def test_slots(device: torch.device) -> None:
    """Sequence 0 continues in slot 5, 1 has no slot, 2 starts from zeros in slot 1."""
    inputs, pool = pool_inputs(6, 3, device)
    before, states = pool.clone(), pool[[5, 0, 1]]
    states[2] = 0
    expected, final = torch_gdn.fused_recurrent_kda(**inputs, initial_state=states, output_final_state=True, **GATE)
    assert final is not None
    indices, flags = torch.tensor([5, -1, 1], device=device), torch.tensor([True, True, False], device=device)
    with kernels_run(device, KERNEL):
        o = torch_gdn.fused_recurrent_kda_(
            **inputs, state_pool=pool, state_indices=indices, has_initial_state=flags, **GATE
        )
    assert (o[1] == 0).all()
    assert_same_bits("o", o[[0, 2]], expected[[0, 2]])
    assert_same_bits("the slots", pool[[5, 1]], final[[0, 2]])
    others = [0, 2, 3, 4, 6, 7]
    assert_same_bits("the other slots", pool[others], before[others])


def test_goes_on_after_what_was_accepted(device: torch.device) -> None:
    """Two of three drafted tokens are accepted, so the next token follows the second."""
    inputs, pool = pool_inputs(4, 1, device)
    state = pool[2:3].clone()
    parts = [{name: x[:, first:last] for name, x in inputs.items()} for first, last in ((0, 3), (0, 2), (3, 4))]
    slots = torch.tensor([[2, 4, 6]], device=device)
    torch_gdn.fused_recurrent_kda_(**parts[0], state_pool=pool, state_indices=slots, **GATE)
    accepted = torch.tensor([2], device=device)
    o = torch_gdn.fused_recurrent_kda_(
        **parts[2], state_pool=pool, state_indices=slots[:, :], num_accepted_tokens=accepted, **GATE
    )
    _, after_two = torch_gdn.fused_recurrent_kda(**parts[1], initial_state=state, output_final_state=True, **GATE)
    expected, _ = torch_gdn.fused_recurrent_kda(**parts[2], initial_state=after_two, **GATE)
    assert_same_bits("o", o, expected)


def test_the_callers_buffer(device: torch.device) -> None:
    inputs, pool = pool_inputs(3, 2, device)
    expected = torch_gdn.fused_recurrent_kda_(**inputs, state_pool=pool.clone())
    out = torch.full((2, 3, 4, 16), torch.nan, device=device)[:, :, 1:3]
    found = torch_gdn.fused_recurrent_kda_(**inputs, state_pool=pool, out=out)
    assert found is out
    assert_same_bits("o", out, expected)
