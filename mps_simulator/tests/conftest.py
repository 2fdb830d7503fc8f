from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # each worker has one core, and threads that spin for another core cost minutes

import torch

import mps_simulator
import scale_kernel
from mps_simulator.device import Settings

FOLDER = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def _simulated_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER)  # the pyproject.toml there loads nothing
        mps_simulator.activate()


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folder() -> Path:
    """Returns a working directory for separate processes. Its project loads nothing."""
    return FOLDER


@pytest.fixture(scope="module")
def scale(_simulated_device: None) -> Any:
    return mps_simulator.metal.Library(scale_kernel.SOURCE).pipeline("scale")


@pytest.fixture
def settings() -> Iterator[Settings]:
    """Yields the live settings and restores them afterwards."""
    live = mps_simulator.settings
    with live(**{name: getattr(live, name) for name in ("watch", "seed", "perturb", "workers", "run_at", "encoder")}):
        yield live
