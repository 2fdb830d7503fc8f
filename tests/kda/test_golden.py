"""Tests every recorded case of FLA's Kimi Delta Attention (tests/golden/kda) on every device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.errors import assert_close
from tests.helpers.kda import CHUNK, F32, FUNCTIONS, RECURRENT, Inputs, exact_kda
from tests.helpers.prefill import each_device
from torch_gdn_check import golden
from torch_gdn_check.registry import bounds
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.sweep(8)

FOLDER = golden.FOLDER / "kda"
INDEX: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads((FOLDER / "index.json").read_text())}
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def cases_of(prefix: str) -> list[str]:
    return [name for name, row in INDEX.items() if prefix in row["functions"]]


@dataclass
class Recorded:
    inputs: Inputs
    options: dict[str, Any]
    outputs: dict[str, Tensor]
    exact: tuple[Tensor, Tensor]
    fla_error: dict[str, float]
    fla_head_errors: dict[str, list[float]]


@cache
def load(name: str) -> Recorded:
    tensors, row = load_file(FOLDER / f"{name}.safetensors"), INDEX[name]
    inputs = {key: tensors.pop(key) for key in INPUTS if key in tensors}
    exact = exact_kda(inputs, **row["options"])
    return Recorded(inputs, row["options"], tensors, exact, row["fla_error"], row["fla_head_errors"])


def run(function: str, inputs: Inputs, options: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    o, state = FUNCTIONS[function](**to_device(inputs, device), **options, output_final_state=True)
    assert state is not None
    return o.cpu(), state.cpu()


@each_device("chunked", "fused_chunk", "recurrent")
@pytest.mark.parametrize("name", cases_of("chunk"))
def test_the_prefill_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    case = load(name)
    o, state = run(CHUNK, case.inputs, case.options, device)
    outputs = {"chunk_o": (o, case.exact[0], 2), "chunk_final_state": (state, case.exact[1], 1)}
    for tensor, (ours, exact, head_dim) in outputs.items():
        theirs, error = case.outputs[tensor], case.fla_error[tensor]
        for part in bounds.compare_with_fla(tensor, ours, theirs, exact, error, head_dim):
            assert part.kept, str(part)


@pytest.mark.parametrize("name", cases_of("recurrent"))
def test_decoding_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    case = load(name)
    o, state = run(RECURRENT, case.inputs, case.options, device)
    theirs, error = case.outputs["recurrent_o"], case.fla_error["recurrent_o"]
    for part in bounds.compare_with_fla("recurrent_o", o, theirs, case.exact[0], error, 2):
        assert part.kept, str(part)
    assert_close("final_state", state, case.exact[1], F32, head_dim=1)


@each_device("chunked", "fused_chunk", "recurrent")
@pytest.mark.parametrize("name", ["safe_gate", "strong_gate", "same_keys"])
def test_in_float32(device: torch.device, name: str) -> None:
    """With the recorded inputs in float32, the error is at most 1e-6, and not FLA's error of 16-bit products."""
    case = load(name)
    wide = {key: x.float() if x.is_floating_point() else x for key, x in case.inputs.items()}
    o, state = run(CHUNK, wide, case.options, device)
    assert_close("o", o, case.exact[0], F32)
    assert_close("final_state", state, case.exact[1], F32, head_dim=1)


@pytest.mark.parametrize("name", INDEX)
def test_the_recorded_error_is_that_of_the_recorded_output(name: str) -> None:
    """This shows for each head that the index, the tensors and our reference belong together."""
    case = load(name)
    assert set(case.outputs) == set(case.fla_error) == set(case.fla_head_errors)
    for tensor, theirs in case.outputs.items():
        exact, head_dim = (case.exact[0], 2) if tensor.endswith("_o") else (case.exact[1], 1)
        assert bounds.relative_error(theirs.double(), exact) == pytest.approx(case.fla_error[tensor], rel=2e-3)
        heads = bounds.head_errors(theirs.double(), exact, head_dim)
        assert heads == pytest.approx(case.fla_head_errors[tensor], rel=2e-3)
