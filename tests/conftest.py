from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.devices import DEVICES, ready

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # each worker has a core; threads that spin for another's core cost minutes


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device the ops run on: `mps` is the Mac's GPU or, without one, the simulated device."""
    return ready(request.param)


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
