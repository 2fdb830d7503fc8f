"""Starts the processes of a distributed job on the loopback address, and ends them all in a bounded time.

They are forks of one process that has imported PyTorch, which takes more time than most jobs.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.devices import on_a_mac

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed"])


@dataclass(frozen=True)
class Ended:
    """A process that has ended. status: its exit status, or None if it had to be killed. output: stdout and stderr."""

    status: int | None
    output: str


def run_script(command: Sequence[str], log: str, environment: dict[str, str]) -> None:
    """Does what `python COMMAND` does, with the simulated device unless this is a Mac."""
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.path[:0] = [str(ROOT), f"{ROOT}/check"]
    if on_a_mac():
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
    else:
        sys.argv = ["mps_simulator", *command]
        runpy.run_module("mps_simulator", run_name="__main__", alter_sys=True)


def run_together(commands: Sequence[Sequence[str]], seconds: float, **environment: str) -> list[Ended]:
    """Runs the commands at the same time, each after `python` with the simulated device, and kills what is left.

    seconds: how long a process may take after the one before it has ended. On a busy machine the last one takes longer.
    """
    variables = {"OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(len(commands))]
        started = []
        for command, log in zip(commands, logs, strict=True):
            log.touch()
            started.append(FORKS.Process(target=run_script, args=(command, str(log), variables)))
            started[-1].start()
        ended = []
        try:
            for process, log in zip(started, logs, strict=True):
                process.join(seconds)
                ended.append(Ended(process.exitcode, log.read_text()))
        finally:
            for process in started:
                process.kill()
                process.join()
        return ended
