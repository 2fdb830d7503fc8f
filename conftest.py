from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has one core. Threads that spin for another core cost minutes. The processes of tests inherit this.
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

os.environ["TORCH_GDN_TUNING_CACHE"] = ""  # so that measurements of this machine change no test
os.environ["TORCH_GDN_SELF_TEST"] = "off"  # its own tests turn it on
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # for the processes that tests start

from tests import sweeps
from tests.helpers.devices import DEVICES, on_a_mac, ready
from tests.quick import is_quick
from torch_gdn.tools.prefill import prefill_algorithm

torch.compiler.config.force_disable_caches = True  # Inductor's cache does not see changes of an op's schema

# Users install no simulated device, laboratory or checker of shaders. `make proof` runs all of their tests.
TAKE_TURNS = (
    "mps_simulator/",
    "evidence/tests/lab/",
    *(f"evidence/tests/proof/test_strict_{part}.py" for part in ("facts", "flow", "indices", "others", "rules")),
)

collect_ignore = [
    "engines/tests/vllm",
    "engines/tests/sglang",
]  # `make test-vllm` and `make test-sglang` have environments


def pytest_report_header() -> str:
    return sweeps.header()


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_quick(item.nodeid):
        item.add_marker("quick")
    if item.nodeid.startswith(TAKE_TURNS) and item.get_closest_marker("sweep") is None:
        item.add_marker(pytest.mark.sweep(1, seeds=4))


@pytest.hookimpl(trylast=True)  # so that it samples what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweeps.deselect(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the million objects that exist by now out of the garbage collector. transformers collects after each of its
    managers, which took a quarter of a second each time.
    """
    gc.freeze()
    has_backwards = any(word in item.path.name for item in session.items for word in ("gradients", "backward", "qlora"))
    if not on_a_mac() and has_backwards:
        ready("mps")  # before the first backward, when autograd counts the devices that there are


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Runs the test on every device, with the default algorithms. `mps` is the Mac's GPU or else the simulated device.

    The parameter "mps-chunked" is `mps` with that prefill algorithm forced (tests/helpers/prefill.py).
    """
    name, _, algorithm = request.param.partition("-")
    result = ready(name)
    with prefill_algorithm(algorithm or None):
        yield result


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
