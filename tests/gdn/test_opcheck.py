"""PyTorch's own test of custom ops: schema, fake, autograd registration, and tracing with dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.calls import COPY, KDA, OPS, STATEFUL, tensors_of, valid_call

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# torch itself raises "NYI devices other than CPU/CUDA/XPU" on mps there.
ON_MPS = tuple(name for name in ALL if name != "test_autograd_registration")


def opcheck(op: str, call: dict[str, Any], device: torch.device) -> None:
    overload = getattr(torch.ops.gdn, op).default
    utils = ON_MPS if device.type == "mps" else ALL
    results = torch.library.opcheck(overload, (), call, test_utils=utils)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_opcheck(device: torch.device, op: str, packed: bool) -> None:
    opcheck(op, valid_call(op, device, packed=packed), device)


def test_opcheck_of_a_copy(device: torch.device) -> None:
    opcheck(COPY, valid_call(COPY, device), device)


@pytest.mark.parametrize("op", STATEFUL)
def test_opcheck_with_the_other_options(device: torch.device, op: str) -> None:
    """No state, or states with V first; for packed sequences no chunk_indices."""
    call = valid_call(op, device) | {"initial_state": None, "output_final_state": False}
    opcheck(op, call, device)
    call = valid_call(op, device, packed=True) | {"state_v_first": True}
    call["initial_state"] = call["initial_state"].transpose(-1, -2)
    call.pop("chunk_indices", None)
    opcheck(op, call, device)


@pytest.mark.parametrize("op", [op for op in OPS if "gated_delta_rule" in op])
def test_opcheck_with_gates_in_the_kernel(device: torch.device, op: str) -> None:
    call = valid_call(op, device, dtype=torch.float16)
    call |= {"use_gate_in_kernel": True, "A_log": torch.zeros(4, device=device), "use_beta_sigmoid_in_kernel": True}
    call |= {"dt_bias": torch.zeros(4, device=device), "output_dtype": torch.float32, "head_grouping": "tiled"}
    if op.startswith("chunk"):
        call["return_intermediate_states"] = True
    else:
        call |= {"gk": -torch.rand(2, 20, 4, 64, device=device), "gv": -torch.rand(2, 20, 4, 32, device=device)}
    opcheck(op, call, device)


@pytest.mark.parametrize("op", [op for op in OPS if op in KDA or "recurrent" in op])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_opcheck_with_gates_of_channels_in_the_kernel(device: torch.device, op: str, lower_bound: float | None) -> None:
    call = valid_call(op, device, dtype=torch.float16) | {"lower_bound": lower_bound}
    if op in KDA:
        call["use_gate_in_kernel"] = True
    else:
        call |= {"g": None, "gk": torch.randn(2, 20, 4, 64, device=device), "use_channel_gate_in_kernel": True}
    call |= {"A_log": torch.zeros(1, 4, 1, device=device), "dt_bias": torch.zeros(4, 64, device=device)}
    call |= {"output_dtype": torch.float32, "head_grouping": "tiled", "use_beta_sigmoid_in_kernel": True}
    if op == "chunk_kda":
        call["return_intermediate_states"] = True
    opcheck(op, call, device)


@pytest.mark.parametrize("op", OPS)
def test_opcheck_with_strided_inputs(device: torch.device, op: str) -> None:
    """The outputs' strides in the fake are those of the kernel: contiguous, whatever the inputs' are."""
    call = valid_call(op, device)
    for name in tensors_of(call):
        if call[name].dim() >= 3:
            call[name] = call[name].transpose(0, 1).contiguous().transpose(0, 1)
    opcheck(op, call, device)


@pytest.mark.parametrize("op", ["fused_recurrent_gated_delta_rule_", "causal_conv1d_update_"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_opcheck_with_accepted_tokens(device: torch.device, op: str, packed: bool) -> None:
    call = valid_call(op, device, packed=packed)
    count = len(call["state_indices"])
    call["num_accepted_tokens"] = torch.full((count,), 2, device=device)
    if op.startswith("causal"):
        call["state_pool"] = torch.randn(5, 32, 22, device=device)  # W - 2 columns and 20 tokens
    else:
        call["state_indices"] = torch.arange(count * 20, device=device).view(count, 20)
        call["state_pool"] = torch.randn(60, 4, 64, 32, device=device)
    opcheck(op, call, device)
