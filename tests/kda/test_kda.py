"""Tests what both ops of Kimi Delta Attention share, except for their numbers, which test_kernels.py tests."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import ready
from tests.helpers.errors import assert_same_bits
from tests.helpers.kda import FUNCTIONS, assert_exact_kda, each_function, exact_kda, kda_inputs
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.sweep(4)


@pytest.mark.parametrize("v_first", [False, True])
@each_function
def test_states_whose_rows_are_vectors(device: torch.device, function: str, v_first: bool) -> None:
    """The CPU decodes them in place. In [K, V] a row has one decay, and in [V, K] a row has a vector of decays."""
    inputs = kda_inputs(20, 48, 64, HV=4)
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    assert_exact_kda(function, inputs, device, state_v_first=v_first)


@each_function
def test_a_bounded_gate_needs_no_A_log(device: torch.device, function: str) -> None:
    assert_exact_kda(function, kda_inputs(9, 32, 32), device, use_gate_in_kernel=True, lower_bound=-5.0)


@each_function
def test_no_state_unless_asked_for(function: str) -> None:
    assert FUNCTIONS[function](**kda_inputs(3, 32, 32))[1] is None


@each_function
def test_fullgraph_gives_the_same_bits(function: str) -> None:
    inputs = kda_inputs(20, 32, 32)

    def call(raw: torch.Tensor) -> torch.Tensor:
        options = {"use_gate_in_kernel": True, "lower_bound": -5.0, "A_log": torch.zeros(2)}
        return FUNCTIONS[function](**(inputs | {"g": raw}), **options)[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same_bits("o", compiled(inputs["g"]), call(inputs["g"]))


def test_of_a_few_tokens_both_functions_have_the_same_bits(device: torch.device) -> None:
    """For up to four tokens, the CPU's chunked op runs the recurrence."""
    inputs = to_device(kda_inputs(4, 32, 32), device)
    assert_same_bits("o", *(function(**inputs)[0] for function in FUNCTIONS.values()))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_token_by_token_from_raw_gates_has_the_bits_of_one_call(
    device: torch.device, lower_bound: float | None
) -> None:
    """A token has 48 gates, which is no multiple of the 32 floats that a vectorised loop of PyTorch takes at once."""
    inputs = to_device(kda_inputs(24, 24, 16), device)
    gate = {"use_gate_in_kernel": True, "A_log": torch.tensor([0.5, -0.5], device=device), "lower_bound": lower_bound}
    _, state = torch_gdn.fused_recurrent_kda(**inputs, **gate, output_final_state=True)
    tokens, decoded = {name: inputs[name] for name in ("q", "k", "v", "g", "beta")}, inputs["initial_state"]
    for t in range(24):
        token = {name: x[:, t : t + 1] for name, x in tokens.items()}
        _, decoded = torch_gdn.fused_recurrent_kda(**token, **gate, initial_state=decoded, output_final_state=True)
    assert_same_bits("final_state", decoded, state)


def test_the_reference_without_decay_is_the_delta_rule() -> None:
    """If all channels have the same decay, the reference must equal that of the gated delta rule."""
    inputs = kda_inputs(20, 32, 32)
    per_head = inputs["g"][..., 0]
    inputs["g"] = per_head[..., None].expand_as(inputs["g"])
    from_rule = torch_gdn.reference.fused_recurrent_gated_delta_rule(
        **(to_device(inputs, ready("cpu")) | {"g": per_head})
    )
    assert (exact_kda(inputs)[0] - from_rule[0]).norm() < 1e-6 * from_rule[0].norm()
