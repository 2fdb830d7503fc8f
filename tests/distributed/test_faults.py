"""What the processes of a job say if one of them is absent, different, dead or slow: one line, in a bounded time."""

from __future__ import annotations

import re
import sys

import pytest

from tests.distributed.faults import SECONDS
from tests.helpers.processes import Ended, run_together
from tests.helpers.streams import free_port

pytestmark = pytest.mark.xdist_group("distributed")
SCRIPT = "tests/distributed/faults.py"


def run(fault: str, ranks: tuple[int, ...] = (0, 1), **environment: str) -> list[Ended]:
    address = f"127.0.0.1:{free_port()}"
    return run_together([[SCRIPT, str(rank), address, fault] for rank in ranks], seconds=120, **environment)


def said(process: Ended) -> tuple[float, str]:
    """Returns after how many seconds the process gave up, and what it said in one line."""
    assert process.status == 3, process
    result = re.search(r"^FAILED after ([\d.]+) s: (.*)$", process.output, re.M)
    assert result, process.output[-2000:]
    after = process.output[result.end() :].strip()
    assert not after or after.startswith("["), after  # but for PyTorch's own log
    return float(result[1]), result[2]


ABSENT = {
    0: rf"expected rank 0 on 127\.0\.0\.1:\d+, got no answer within {SECONDS} s",
    1: rf"expected 2 processes, got none of rank 1 within {SECONDS} s",
}


@pytest.mark.parametrize("absent", ABSENT)
def test_a_process_that_never_comes(absent: int) -> None:
    (alone,) = run("absent", ranks=(1 - absent,))
    assert alone.status == 3, alone
    result = re.search(r"^FAILED after ([\d.]+) s: init_process_group: (.*)$", alone.output, re.M)
    assert result, alone.output[-2000:]
    assert SECONDS <= float(result[1]) < 5 * SECONDS
    assert re.fullmatch(ABSENT[absent], result[2]), result[2]


def test_processes_of_two_versions() -> None:
    for process in run("version"):
        _, line = said(process)
        assert re.fullmatch(
            r"init_process_group: expected the same versions in all processes, got torch_gdn \S+ with PyTorch \S+ "
            r"in rank \d and torch_gdn \S+ with PyTorch \S+ in rank \d on \S+",
            line,
        )
        assert "torch_gdn 0.0.9 with" in line


def test_a_process_that_dies() -> None:
    first, second = run("killed")
    assert second.status == -9
    _, line = said(first)
    assert line.startswith("all_reduce: rank 0 of 2: the connection to another process is lost (gloo: "), line


@pytest.mark.parametrize(
    ("fault", "status", "expected"),
    [
        ("killed idle", -9, "rank 1 of the processes: the connection is lost"),
        ("left", 0, "rank 1 of the processes has ended"),
        ("stopped idle", 3, f"rank 1 of the processes has not answered for {SECONDS} s"),
    ],
)
def test_an_idle_process_is_told(fault: str, status: int, expected: str) -> None:
    first, second = run(fault)
    assert second.status == status, second
    _, line = said(first)
    assert line.startswith(expected), line
    if fault == "stopped idle":
        _, line = said(second)
        assert line.startswith("rank 0 of the processes: the connection is lost"), line


def test_a_process_that_is_too_slow() -> None:
    first, second = run("stopped")
    assert second.status == 0
    seconds, line = said(first)
    assert SECONDS - 0.1 <= seconds < 3 * SECONDS
    assert line.startswith("all_reduce: rank 0 of 2: another process did not answer in time (gloo: "), line


def test_a_back_end_of_pytorch_itself_is_left_alone() -> None:
    process = run_together([["tests/distributed/own_back_end.py"]], seconds=120)[0]
    assert process.status == 0, process
    assert "KERNELS allreduce_" in process.output.splitlines()
    assert re.search(
        r"^REFUSED init_process_group: PyTorch \S+ has collectives for mps itself: use its own back end, 'metal', "
        r"instead of 'torch_gdn'$",
        process.output,
        re.M,
    ), process.output


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's table of sockets")
@pytest.mark.parametrize("interface", ["", "lo"])
def test_nothing_listens_on_other_addresses(interface: str) -> None:
    for process in run("addresses", **({"GLOO_SOCKET_IFNAME": interface} if interface else {})):
        assert process.status == 0, process
        (addresses,) = re.findall(r"^LISTENING (.*)$", process.output, re.M)
        loopback = "0100007F" if sys.byteorder == "little" else "7F000001"
        assert set(addresses.split()) == {loopback}, addresses
