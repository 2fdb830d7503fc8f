from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["TORCH_GDN_TUNING_CACHE"] = ""  # what was measured on this machine changes no test

from tests.helpers.devices import DEVICES, ready
from torch_gdn.tune import prefill_algorithm

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # each worker has a core; threads that spin for another's core cost minutes


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device the ops run on: `mps` is the Mac's GPU or, without one, the simulated device."""
    return ready(request.param)


@pytest.fixture(autouse=True)
def _prefills_are_staged() -> Iterator[None]:
    """Whatever the table has for the test's shapes; tests/gdn/test_prefill_algorithm.py has the other algorithms."""
    with prefill_algorithm("chunked"):
        yield


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
