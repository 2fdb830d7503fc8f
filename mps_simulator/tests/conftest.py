from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.device import Settings
from tests.helpers.devices import on_a_mac
from tests.simulator import scale_kernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if on_a_mac():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="this machine has a Metal device of its own"))


@pytest.fixture(autouse=True, scope="session")
def _simulated_device() -> None:
    simulator.activate()


@pytest.fixture(scope="session")
def scale(_simulated_device: None) -> Any:
    return simulator.metal.Library(scale_kernel.SOURCE).pipeline("scale")


@pytest.fixture
def settings() -> Iterator[Settings]:
    """The live settings; put back afterwards."""
    names = ("watch", "seed", "perturb", "workers", "run_at")
    before = {name: getattr(simulator.settings, name) for name in names}
    yield simulator.settings
    for name, value in before.items():
        setattr(simulator.settings, name, value)
