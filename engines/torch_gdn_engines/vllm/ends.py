"""Ends all processes of an engine, on all machines, when one of them has died or is stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time

import psutil
from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

SECONDS_TO_END = 10


def patience() -> float:
    """Returns after how many seconds a silent process is given up: before vLLM gives up the step and names none."""
    return 0.9 * float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)


def end_process(why: str) -> None:
    """Ends this worker, in order if it can. The process of vLLM that started it sees that, and ends."""
    logger.error("%s; this process ends too", why)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


def end_with_parent() -> None:
    """Ends this worker if vLLM's process that started it has ended: vLLM's own watch does not end a collective."""
    if parent := multiprocessing.parent_process():
        parent.join()
        time.sleep(SECONDS_TO_END)
        logger.error("the process that started this worker has ended; this process ends too")
        os._exit(1)


def kill_stopped(workers: list[psutil.Process]) -> None:
    """Kills workers of this machine that are stopped, until all have ended: a stopped one cannot end by itself."""
    seconds = dict.fromkeys(workers, 0)
    while any(worker.is_running() for worker in workers):
        time.sleep(1)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds[worker] = seconds[worker] + 1 if worker.status() == psutil.STATUS_STOPPED else 0
                if seconds[worker] >= patience():
                    logger.error("worker %d has been stopped for %d s; it is killed", worker.pid, seconds[worker])
                    worker.kill()
