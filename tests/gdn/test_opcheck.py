"""Runs PyTorch's own test of custom ops: schema, fake, autograd registration, and tracing with dynamic shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_gdn_check.registry import REGISTRY, OpEntry
from torch_gdn_check.registry.inputs import strided, tensors_of, to_device

pytestmark = pytest.mark.sweep(10)  # all cases take a minute on two cores

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# On mps, torch itself raises "NYI devices other than CPU/CUDA/XPU" in that test.
ON_MPS = tuple(name for name in ALL if name != "test_autograd_registration")
BATCHES = [(entry, packed) for entry in REGISTRY.values() for packed in sorted({False, entry.packable})]
RULES = [entry for entry in REGISTRY.values() if "use_gate_in_kernel" in entry.arguments]
STATEFUL = [entry for entry in REGISTRY.values() if {"initial_state", "state_v_first"} <= {*entry.arguments}]
WITH_A_BOUND = [entry for entry in RULES if "lower_bound" in entry.arguments]


def named(entry: object) -> str | None:
    return entry.name if isinstance(entry, OpEntry) else None


def opcheck(op: str, call: dict[str, Any], device: torch.device) -> None:
    overload = getattr(torch.ops.gdn, op).default
    utils = ON_MPS if device.type == "mps" else ALL
    results = torch.library.opcheck(overload, (), to_device(call, device), test_utils=utils)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize(("entry", "packed"), BATCHES, ids=named)
def test_opcheck(device: torch.device, entry: OpEntry[Any], packed: bool) -> None:
    opcheck(entry.name, entry.smallest(packed), device)


@pytest.mark.parametrize("entry", REGISTRY.values(), ids=named)
def test_opcheck_without_options(device: torch.device, entry: OpEntry[Any]) -> None:
    options = {each.name for each in entry.overload._schema.arguments if each.has_default_value()}
    options -= {"chunk_size"}  # some tensors have as many rows
    call = {name: x for name, x in entry.smallest().items() if name not in options}
    opcheck(entry.name, call, device)


@pytest.mark.parametrize("entry", STATEFUL, ids=named)
def test_opcheck_with_values_first(device: torch.device, entry: OpEntry[Any]) -> None:
    """Packed sequences have no chunk_indices."""
    call = entry.smallest(packed=True) | {"state_v_first": True}
    call |= {name: call[name].transpose(-1, -2) for name in ("initial_state", "dht") if name in call}
    call.pop("chunk_indices", None)
    opcheck(entry.name, call, device)


@pytest.mark.parametrize("entry", RULES, ids=named)
def test_opcheck_with_gates_in_the_kernel(device: torch.device, entry: OpEntry[Any]) -> None:
    call = entry.call(replace(entry.small, dtype=torch.float16, gated=True))
    call |= {"output_dtype": torch.float32, "head_grouping": "tiled"}
    if "return_intermediate_states" in entry.arguments:
        call["return_intermediate_states"] = True
    opcheck(entry.name, call, device)


@pytest.mark.parametrize("entry", WITH_A_BOUND, ids=named)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_opcheck_with_gates_of_channels_in_the_kernel(
    device: torch.device, entry: OpEntry[Any], lower_bound: float | None
) -> None:
    call = entry.smallest(dtype=torch.float16) | {"lower_bound": lower_bound, "use_gate_in_kernel": True}
    call |= {"A_log": torch.zeros(1, 4, 1), "dt_bias": torch.zeros(4, 64)}
    call |= {"output_dtype": torch.float32, "head_grouping": "tiled", "use_beta_sigmoid_in_kernel": True}
    if "return_intermediate_states" in entry.arguments:
        call["return_intermediate_states"] = True
    opcheck(entry.name, call, device)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in REGISTRY.values() if not {"out", "key_cache", "codes"} & {*entry.written[:1]}],
    ids=named,
)
def test_opcheck_with_strided_inputs(device: torch.device, entry: OpEntry[Any]) -> None:
    """The fake's outputs have the kernel's strides: they are contiguous whatever the inputs' strides are."""
    call = entry.smallest()
    call |= {name: strided(call[name]) for name in tensors_of(call) if call[name].dim() >= 3}
    opcheck(entry.name, call, device)


@pytest.mark.parametrize(
    ("entry", "packed"), [each for each in BATCHES if "num_accepted_tokens" in each[0].arguments], ids=named
)
def test_opcheck_with_accepted_tokens(device: torch.device, entry: OpEntry[Any], packed: bool) -> None:
    call = entry.smallest(packed)
    count, pool = len(call["state_indices"]), call["state_pool"]
    call["num_accepted_tokens"] = torch.full((count,), 2)
    if pool.dim() == 3:
        call["state_pool"] = torch.randn(5, 32, 22)  # W - 2 columns and 20 tokens
    else:
        call["state_indices"] = torch.arange(count * 20).view(count, 20)
        call["state_pool"] = torch.randn(60, *pool.shape[1:])
    if "conv_pool" in call:
        call["conv_pool"] = torch.randn(60, call["conv_weight"].shape[0], 22)
    opcheck(entry.name, call, device)
