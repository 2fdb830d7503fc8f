"""Starts the processes of a distributed job on the loopback address, and ends them all in a bounded time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.devices import on_a_mac

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, *([] if on_a_mac() else ["-m", "mps_simulator"])]


@dataclass(frozen=True)
class Ended:
    """A process that has ended. status: its exit status, or None if it had to be killed. output: stdout and stderr."""

    status: int | None
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_together(commands: Sequence[Sequence[str]], seconds: float, **environment: str) -> list[Ended]:
    """Runs the commands at the same time, each after `python` with the simulated device, and kills what is left.

    seconds: how long a process may take after the one before it has ended. On a busy machine the last one takes longer.
    """
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/check", "OMP_NUM_THREADS": "1"} | environment
    logs = [tempfile.TemporaryFile(mode="w+") for _ in commands]  # noqa: SIM115 (closed below)
    started = [
        subprocess.Popen([*PYTHON, *command], cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
        for command, log in zip(commands, logs, strict=True)
    ]
    ended = []
    try:
        for process, log in zip(started, logs, strict=True):
            status: int | None = None
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            ended.append(Ended(status, log.read()))
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    return ended
