"""Runs steps in a separate process, so that a crash or a hang is only that step's failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch

from torch_gdn import _C, self_test
from torch_gdn._compiling import by_source
from torch_gdn_check.device import compile_together
from torch_gdn_check.steps import COMPILE, FAIL, Result, Step, execute

STEP_SECONDS = 600.0  # per step; a Mac's GPU ends its own hangs in seconds, but the simulated device is slow
START_SECONDS = 600.0  # for the process, which may have to build the simulated device first
MOST_LOSSES = 10  # processes that may die before the remaining steps are skipped
LOG_CHARACTERS = 10_000


@dataclass(frozen=True)
class Setup:
    """The settings that make the worker process like the one that the user started."""

    shaders: str
    simulated: dict[str, Any] | None  # the arguments of mps_simulator.activate()
    device: str = "mps"


def serve(connection: Connection, setup: Setup, log: str) -> None:
    """Runs in the process: reports that it is ready, then answers steps with results until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process writes the report
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # captures what PyTorch and Metal print, so that the report can quote it
        os.dup2(descriptor, stream)
    if setup.simulated is not None:
        import mps_simulator

        mps_simulator.activate(**setup.simulated)
    _C.set_shader_directory(setup.shaders)
    os.environ[self_test.VARIABLE] = "off"  # because the check tests the kernels themselves
    torch.set_grad_enabled(False)
    connection.send(None)
    while True:
        try:
            step = connection.recv()
        except EOFError:
            return
        connection.send(execute(step, torch.device(setup.device)))


class Worker:
    """Runs one process at a time, and starts the next one when needed."""

    def __init__(self, setup: Setup, step_seconds: float = STEP_SECONDS) -> None:
        self._setup = setup
        self._step_seconds = step_seconds
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        descriptor, log = tempfile.mkstemp(prefix="torch_gdn_check_", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._given_up = ""
        self._lock = Lock()  # separates starting a process from ending all
        self._losses = 0

    def run(self, step: Step) -> Result:
        if self._given_up:
            return step.result(FAIL, self._given_up)
        printed = self._log.stat().st_size
        try:
            connection = self._connection or self._start()
            connection.send(step)
            result: Result = self._answer(connection, self._step_seconds)
            return result
        except (EOFError, OSError) as error:  # the process is gone; TimeoutError is an OSError
            return step.result(FAIL, self._loss(error, printed))

    def end(self) -> None:
        """Ends the process, and with it a step that another thread waits for. It starts no other process."""
        with self._lock:
            self._given_up = self._given_up or "interrupted"
            if self._process is not None:
                self._process.kill()  # the waiting thread then sees the end

    def close(self) -> None:
        self._end()
        self._log.unlink(missing_ok=True)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._setup, str(self._log)), daemon=True)
        with self._lock:
            if self._given_up:
                raise EOFError(self._given_up)
            process.start()
            self._process, self._connection = process, ours
        theirs.close()
        self._answer(ours, START_SECONDS)
        return ours

    def _answer(self, connection: Connection, seconds: float) -> Any:
        if not connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        return connection.recv()

    def _loss(self, error: Exception, printed: int) -> str:
        """Ends the process, and reports its end with what it printed last."""
        timed_out = isinstance(error, TimeoutError)
        code = self._end(wait=not timed_out)
        message = f"{error}; the process was stopped" if timed_out else f"the process died: {ending(code)}"
        with self._log.open("rb") as file:
            file.seek(printed)
            text = file.read().decode(errors="replace")[-LOG_CHARACTERS:].strip()
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            self._given_up = f"not tried: {self._losses} processes died or hung before; the last one: {message}"
        return f"{message}\n{text}".strip()

    def _end(self, wait: bool = False) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.join(10 if wait else 0)
        process.kill()
        process.join()
        return process.exitcode


class Workers:
    """Runs several processes, each taking the next steps. It is for compiling, which uses one core per process."""

    def __init__(self, setup: Setup, count: int) -> None:
        self._workers = [Worker(setup) for _ in range(count)]

    def run(self, steps: Sequence[Step]) -> Iterator[Result]:
        """Yields the results in the order in which they are ready."""
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            free.put(worker)

        def by_a_free_one(batch: list[Step]) -> list[Result]:
            worker = free.get()
            try:
                if len(batch) > 1:  # each remaining step is then compiled by itself
                    variants = tuple(step.variant for step in batch if step.variant is not None)
                    worker.run(Step(COMPILE, "together", "", partial(compile_together, variants=variants)))
                return [worker.run(step) for step in batch]
            finally:
                free.put(worker)

        threads = ThreadPoolExecutor(len(self._workers))
        try:
            for done in as_completed([threads.submit(by_a_free_one, batch) for batch in batches(steps)]):
                yield from done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.end()  # after an interruption, a step that still runs is lost
            threads.shutdown()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def batches(steps: Sequence[Step]) -> list[list[Step]]:
    """Groups steps whose kernel variants compile from one source. Any other step is by itself."""
    by_variant = {step.variant: step for step in steps if step.variant is not None}
    together = [[by_variant[variant] for variant in source] for source in by_source(by_variant)]
    return together + [[step] for step in steps if step.variant is None]


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"
