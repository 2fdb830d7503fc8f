"""What an op allocates holds NaN before: none of it may be read before it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.calls import OPS, run_op, valid_call
from tests.helpers.devices import ready
from tests.helpers.errors import assert_same_bits


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # and with it torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def results(op: str, call: dict) -> list[Tensor]:
    found = run_op(op, call)
    written = [call[name] for name in ("state_pool",) if name in call]
    return [x.cpu() for x in (found if isinstance(found, (tuple, list)) else [found]) if x is not None] + written


@pytest.mark.usefixtures("nan_in_new_memory")
def test_new_memory_is_nan(device: torch.device) -> None:
    assert torch.empty(1000, device=device).isnan().all()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_nan_in_new_memory_changes_nothing(
    device: torch.device, op: str, packed: bool, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    expected = results(op, valid_call(op, device, packed=packed))
    assert all(x.isfinite().all() for x in expected)
    torch.manual_seed(0)
    call = valid_call(op, device, packed=packed)
    request.getfixturevalue("nan_in_new_memory")
    for x, with_nan in zip(expected, results(op, call), strict=True):
        assert_same_bits(op, with_nan, x)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_outputs_of_launches_that_are_recorded_are_zeros() -> None:
    x = torch.ones(5, 44, device=ready("mps"))
    with torch_gdn.recording():
        y = torch_gdn.l2norm(x)
    assert torch.equal(y.cpu(), torch.zeros(5, 44))
