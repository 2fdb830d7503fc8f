"""The collectives of torch_gdn.distributed, in three processes. collectives.py has what they check."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch.distributed as dist

from tests.distributed.collectives import checks_of
from tests.helpers.processes import Ended, run_together
from tests.helpers.streams import free_port
from torch_gdn.distributed import host_of, rendezvous

SCRIPT = "tests/distributed/collectives.py"
SIZE = 3
BACKENDS = ("torch_gdn", "cpu:gloo,mps:torch_gdn")
pytestmark = pytest.mark.xdist_group("distributed")  # one process, which runs each job once


@cache
def ended(backend: str) -> list[Ended]:
    address = f"127.0.0.1:{free_port()}"
    return run_together([[SCRIPT, str(rank), str(SIZE), address, backend] for rank in range(SIZE)], seconds=240)


def outcomes(process: Ended) -> dict[str, str]:
    _, found, after = process.output.partition("OUTCOMES")
    result: dict[str, str] = json.loads(after.partition("\n")[0]) if found else {}
    return result


@pytest.mark.parametrize(
    ("backend", "check"), [(backend, check) for backend in BACKENDS for check in checks_of(backend)]
)
def test_collective(backend: str, check: str) -> None:
    for rank, process in enumerate(ended(backend)):
        outcome = outcomes(process).get(check, f"not reached:\n{process.output[-3000:]}")
        assert outcome == "ok", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_process_ends_well(backend: str) -> None:
    assert [process.status for process in ended(backend)] == [0] * SIZE, ended(backend)[0].output[-3000:]


def test_a_stores_address_is_found_below_any_prefix() -> None:
    store: dist.Store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name in ("group", "of a group"):
        store = dist.PrefixStore(name, store)
        assert host_of(store) == "localhost"


@pytest.mark.parametrize("query", ["", "?rank=0", "?world_size=1", "?rank=-1&world_size=1", "?rank=0&world_size=0"])
def test_an_address_wants_a_rank_and_a_size(query: str) -> None:
    with pytest.raises(ValueError, match="expected rank and world_size with an init_method"):
        next(rendezvous(f"torch-gdn://127.0.0.1:1{query}"))
