from __future__ import annotations

import pytest
import torch

from tests.helpers.devices import DEVICES, ready


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device the ops run on: `mps` is the Mac's GPU or, without one, the simulated device."""
    return ready(request.param)


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
