"""Compares the states between chunks that both rules' chunked ops return with the float64 recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers import kda
from tests.helpers.devices import kernels_run
from tests.helpers.errors import CHUNK_STATE, assert_close, assert_same_bits
from tests.helpers.kda import Inputs, exact_kda, kda_inputs
from tests.helpers.prefill import ALGORITHMS
from torch_gdn import reference
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry.inputs import doubled, to_device

pytestmark = pytest.mark.sweep(6)

KERNELS = {"chunk_gated_delta_rule": ALGORITHMS["chunked"], kda.CHUNK: kda.CHUNKED}
F32 = {"chunk_gated_delta_rule": 2e-6, kda.CHUNK: kda.F32}
each_rule = pytest.mark.parametrize("op", KERNELS)


def inputs_of(op: str, T: int, **sizes: Any) -> Inputs:
    inputs = kda_inputs(T, 32, 16, **sizes)
    return inputs if op == kda.CHUNK else inputs | {"g": inputs["g"][..., 0].contiguous()}


def state_after(op: str, tokens: int, inputs: Inputs) -> Tensor:
    """Returns the exact state of one batch row after `tokens` tokens."""
    if tokens == 0:
        return inputs["initial_state"]
    first = {name: x if name == "initial_state" else x[:, :tokens] for name, x in inputs.items()}
    if op == kda.CHUNK:
        return exact_kda(first)[1]
    wide: dict[str, Any] = {name: doubled(x) for name, x in first.items()}
    _, state = reference.fused_recurrent_gated_delta_rule(**wide, output_final_state=True)
    assert state is not None
    return state


def states_between(op: str, inputs: Inputs, device: torch.device, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states on any device. On mps only the chunked algorithm stores them in memory."""
    with kernels_run(device, *KERNELS[op]):
        o, state, h = getattr(torch_gdn, op)(**to_device(inputs, device), **options, return_intermediate_states=True)
    return o, state, h


@pytest.mark.sweep(6)
@pytest.mark.parametrize("T", [3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_rule
def test_a_batch(device: torch.device, op: str, dtype: torch.dtype, T: int) -> None:
    """o and the final state are the same as without the states between chunks."""
    inputs = inputs_of(op, T, B=2, dtype=dtype)
    o, state, h = states_between(op, inputs, device, chunk_size=32, output_final_state=True)
    rows = -(-T // 32)
    assert h.shape == (2, rows, 2, 32, 16)
    assert h.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    for row in range(rows):
        exact = state_after(op, 32 * row, inputs)
        assert_close(f"h[:, {row}]", h[:, row].cpu(), exact, CHUNK_STATE.get(dtype, F32[op]), head_dim=1)
    on_device, pool = to_device(inputs, device), inputs["initial_state"].to(device, copy=True)
    del on_device["initial_state"]
    options = {"chunk_size": 32, "return_intermediate_states": True}
    _, in_place = getattr(torch_gdn, f"{op}_")(**on_device, state_pool=pool, **options)
    assert_same_bits("h in place", in_place, h)
    if T > 4:  # for fewer tokens, the CPU runs the recurrence
        with prefill_algorithm("chunked"):
            plain = getattr(torch_gdn, op)(**to_device(inputs, device), chunk_size=32, output_final_state=True)
        assert_same_bits("o", o, plain[0])
        assert_same_bits("final_state", state, plain[1])


@pytest.mark.parametrize("on_device", [False, True])
@each_rule
def test_packed_sequences(device: torch.device, op: str, on_device: bool) -> None:
    """FLA's rows come first, then rows of zeros, because the host does not know the number of chunks."""
    inputs = inputs_of(op, 70, N=3)
    cu_seqlens = torch.tensor([0, 40, 40, 70], device=device if on_device else "cpu")
    _, none, h = states_between(op, inputs | {"cu_seqlens": cu_seqlens}, device, chunk_size=32)
    assert none is None and h.shape == (1, 3 + 3, 2, 32, 16)
    second = state_after(op, 32, inputs | {"initial_state": inputs["initial_state"][:1]})
    for row, exact in enumerate((inputs["initial_state"][:1], second, inputs["initial_state"][2:])):
        assert_close(f"h[:, {row}]", h[:, row].cpu(), exact, F32[op], head_dim=1)
    assert (h[:, 3:] == 0).all()


@each_rule
def test_v_first_and_no_tokens(device: torch.device, op: str) -> None:
    inputs = inputs_of(op, 40)
    _, _, h = states_between(op, inputs, device, chunk_size=16)
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    _, _, transposed = states_between(op, inputs, device, chunk_size=16, state_v_first=True)
    assert_same_bits("h", transposed.mT, h)
    empty = to_device(inputs_of(op, 0, N=2) | {"cu_seqlens": torch.tensor([0, 0, 0])}, device)
    _, _, h = getattr(torch_gdn, op)(**empty, return_intermediate_states=True)
    assert h.shape == (1, 2, 2, 32, 16) and (h == 0).all()
