"""Tests every recorded case of FLA (tests/golden) on every device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.cases import assert_exact, run
from tests.helpers.devices import kernels_run
from tests.helpers.errors import relative_error
from tests.helpers.golden import NAMES, assert_as_exact_as_fla, load
from tests.helpers.prefill import each_device, each_op
from torch_gdn_check import golden as recorded
from torch_gdn_check.registry import stages

pytestmark = pytest.mark.sweep(8)

CHUNKED = [name for name in NAMES if name != "decode_b4"]
STAGED = [name for name in CHUNKED if name != "half_k128"]


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("op", stages.OUTPUTS)
def test_a_stage_fed_what_fla_was_fed(device: torch.device, op: str, name: str) -> None:
    golden = load(name)
    with kernels_run(device, op):
        results = stages.call(op, golden.tensors, device)
    assert tuple(results) == stages.OUTPUTS[op]
    for part in recorded.stage_parts(golden, results):
        assert part.kept, str(part)


@each_device("chunked", "recurrent")
@pytest.mark.parametrize("name", CHUNKED)
def test_the_prefill_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    assert_as_exact_as_fla(name, "chunk_gated_delta_rule", device)


@pytest.mark.parametrize("name", NAMES)
def test_the_recurrent_op_is_as_exact_as_fla(device: torch.device, name: str) -> None:
    assert_as_exact_as_fla(name, "fused_recurrent_gated_delta_rule", device)


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("name", ["ragged_k64", "same_keys"])
def test_in_float32(device: torch.device, op: str, name: str) -> None:
    """The recorded inputs are in float32. Errors meet the rules' section "f32", and not FLA's own of TF32."""
    golden = load(name)
    in_f32 = golden.case.map(torch.Tensor.float)
    assert_exact(op, in_f32, run(op, in_f32, device))


def test_the_recorded_error_is_that_of_the_recorded_output() -> None:
    """This shows that the index, the tensors and our reference belong together."""
    for name in CHUNKED:
        golden = load(name)
        measured = relative_error(golden.tensors["chunk_o"].double(), golden.exact[0])
        assert measured == pytest.approx(golden.fla_error["chunk_o"], rel=2e-3)
