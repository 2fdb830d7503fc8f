"""Tests that no op reads memory that it allocates before it writes it. New memory holds NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import ready
from torch_gdn_check.registry import REGISTRY, OpEntry
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.sweep(6)

BATCHES = [(entry, packed) for entry in REGISTRY.values() for packed in sorted({False, entry.packable})]


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # this also turns on torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_new_memory_is_nan(device: torch.device) -> None:
    assert torch.empty(1000, device=device).isnan().all()


@pytest.mark.parametrize(
    ("entry", "packed"), BATCHES, ids=[f"{e.name}-{'packed' if p else 'batch'}" for e, p in BATCHES]
)
def test_nan_in_new_memory_changes_nothing(
    device: torch.device, entry: OpEntry[Any], packed: bool, request: pytest.FixtureRequest
) -> None:
    expected_call, call = (to_device(entry.smallest(packed), device) for _ in range(2))
    expected = entry.outputs(expected_call, entry.run(expected_call))
    assert all(x.isfinite().all() for x in expected.values())
    request.getfixturevalue("nan_in_new_memory")
    for name, x in entry.outputs(call, entry.run(call)).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.usefixtures("nan_in_new_memory")
def test_outputs_of_launches_that_are_recorded_are_zeros() -> None:
    x = torch.ones(5, 44, device=ready("mps"))
    with torch_gdn.recording():
        y = torch_gdn.l2norm(x)
    assert torch.equal(y.cpu(), torch.zeros(5, 44))
