"""DistributedDataParallel and FSDP2 on mps: two processes lose what one loses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.helpers.processes import run_together
from tests.helpers.streams import free_port

pytestmark = pytest.mark.xdist_group("distributed")


@cache
def losses(way: str, size: int) -> list[list[float]]:
    address = f"127.0.0.1:{free_port()}"
    commands = [["tests/distributed/training.py", str(rank), str(size), address, way] for rank in range(size)]
    result = []
    for process in run_together(commands, seconds=240):
        assert process.status == 0, process.output[-3000:]
        result.append(json.loads(process.output.partition("LOSSES")[2].partition("\n")[0]))
    return result


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_lose_what_one_does(way: str) -> None:
    (alone,) = losses("one", 1)
    first, second = losses(way, 2)
    assert first == second
    assert alone[2] < alone[0] - 0.5  # it learns, so that wrong gradients would change the later losses
    for result, expected in zip(first, alone, strict=True):
        assert abs(result - expected) < 1e-5 * expected, (first, alone)


@pytest.mark.parametrize("lacks", ["del fsdp._fsdp_collectives.chunk_cat", "sys.modules[fsdp.__name__] = None"])
def test_another_pytorchs_fsdp_is_named(lacks: str) -> None:
    program = f"import sys\nfrom torch.distributed.fsdp import _fully_shard as fsdp\n{lacks}\nimport torch_gdn.fsdp"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    expected = r"ImportError: torch_gdn\.fsdp: expected the FSDP of PyTorch 2\.13, got that of \S+: "
    assert re.match(rf"{expected}.*(chunk_cat|_fully_shard)", last), last
