"""Runs Python programs in forks of one process, which has imported slow modules, but nothing of any tree."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = ("numpy", "pytest", "hypothesis", "torch", "torch._dynamo", "transformers.modeling_utils")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork would lose any other thread
OF_A_TEST = 120  # processor seconds; no test takes half of that, however busy the machine is
ENDLESS = -signal.SIGPROF  # the status of a program with a test that took longer


class Trial:
    """A plugin of pytest: the classes' tests run last, sweeps run after other tests, and each test has a time limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: ("/properties/" in item.nodeid, item.get_closest_marker("sweep") is not None))

    def pytest_runtest_logstart(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def pytest_runtest_logfinish(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Forks:
    """The process that forks. It starts with the first program, and ends with the process that made this object."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, arguments: Sequence[str], folder: Path, environment: dict[str, str], output: Path, seconds: float
    ) -> int | None:
        """Returns the status of `python ARGUMENTS`, or None if it did not end in this time."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-u", __file__, str(OF_A_TEST), *MODULES], env=os.environ | ONE_THREAD, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._server.stdin and self._server.stdout
        request = [arguments, str(folder), environment | ONE_THREAD, str(output), seconds]
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status: int | None = json.loads(self._server.stdout.readline())
        return status


def serve() -> None:
    answers = os.dup(1)
    del sys.path[0]  # this file's folder
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        arguments, folder, environment, output, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            os.close(answers)
            enter(folder, environment, output)
            run(arguments)
            return
        os.write(answers, json.dumps(status_of(child, seconds)).encode() + b"\n")


def status_of(child: int, seconds: float) -> int | None:
    """Waits for a program, and ends what it started. Input that is readable has ended, and so has the caller."""
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([handle, sys.stdin], [], [], seconds)
    os.close(handle)
    os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if handle in ready else None


def enter(folder: str, environment: dict[str, str], output: str) -> None:
    os.setsid()
    file, nothing = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = False


def run(arguments: list[str]) -> None:
    """Does what `python ARGUMENTS` does."""
    if arguments[:2] == ["-m", "pytest"]:
        import pytest

        sys.exit(pytest.main(arguments[2:], plugins=[Trial(float(sys.argv[1]))]))
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
