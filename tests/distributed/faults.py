"""One process of a job in which something is wrong: python faults.py RANK ADDRESS FAULT. test_faults.py starts two."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_gdn import distributed

SECONDS = 4


def listening() -> list[str]:
    """Returns the addresses on which this process listens, from Linux's tables."""
    sockets = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{each}"))
    result = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    result.append(fields[1].partition(":")[0])
    return result


def idle_in_a_ring(rank: int, fault: str) -> None:
    """Raises what a process is told, after more than the group's time-out without a call: rank 0 when rank 1 dies,
    leaves or is stopped, and rank 1 when it continues.
    """
    told: queue.Queue[str] = queue.Queue()
    ring = distributed.Ring(told.put, SECONDS)
    dist.barrier()
    time.sleep(1.5 * SECONDS)
    if fault == "stopped idle" and rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep {3 * SECONDS}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 or fault == "stopped idle":
        raise RuntimeError(told.get(timeout=60))
    if fault == "killed idle":
        os.kill(os.getpid(), signal.SIGKILL)
    ring.leave()


def read_versions_late() -> None:
    """Lets rank 0, which has the store, be ready to end first."""
    get = dist.PrefixStore.get

    def late(store: dist.PrefixStore, key: str) -> bytes:
        time.sleep(0.5)
        return get(store, key)

    dist.PrefixStore.get = late  # type: ignore[method-assign]


def main(own: str, address: str, fault: str) -> None:
    rank = int(own)
    if fault == "version" and rank == 1:
        distributed.__version__ = "0.0.9"
        read_versions_late()
    started = time.monotonic()
    try:
        dist.init_process_group(
            "torch_gdn",
            init_method=f"torch-gdn://{address}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=SECONDS),
        )
        x = torch.ones(4, device="mps")
        dist.all_reduce(x)
        if fault == "addresses":
            print("LISTENING", *listening())
        if fault in ("killed idle", "left", "stopped idle"):
            return idle_in_a_ring(rank, fault)
        if fault in ("killed", "stopped") and rank == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * SECONDS)
            return
        started = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        for ask in (work.get_future().wait, work.wait, work.get_future().value):  # an error can be asked for often
            with contextlib.suppress(RuntimeError):
                ask()
        work.wait()
    except Exception as error:
        print(f"FAILED after {time.monotonic() - started:.1f} s: {error}")
        sys.exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
