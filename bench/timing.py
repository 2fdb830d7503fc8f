"""How long calls take: the contenders in turn, round after round, so that what else the machine does meets them all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Call = Callable[[], object]
LEAST_SECONDS = 1e-3  # of what the clock is read around: shorter calls are repeated
LEAST_ROUNDS, MOST_ROUNDS = 3, 200


class Time(NamedTuple):
    """Seconds of one call: the best round, which other work disturbed least, and the median."""

    best: float
    median: float


def wait_for(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()


def measure(calls: Mapping[str, Call], device: torch.device, seconds: float = 1.0) -> dict[str, Time]:
    """Each call for about `seconds`. On a GPU the calls of a round are encoded before the device is waited for."""
    repeats = {name: repeats_of(call, device) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(MOST_ROUNDS):
        waiting = [name for name in calls if not is_done(rounds[name], repeats[name], seconds)]
        if not waiting:
            break
        for name in waiting:
            rounds[name].append(time_of(calls[name], repeats[name], device))
    return {name: Time(min(times), statistics.median(times)) for name, times in rounds.items()}


def is_done(times: list[float], repeats: int, seconds: float) -> bool:
    return len(times) >= LEAST_ROUNDS and sum(times) * repeats >= seconds


def repeats_of(call: Call, device: torch.device) -> int:
    """How many calls a round needs; the first call, which may compile or allocate, does not count."""
    call()
    return max(1, math.ceil(LEAST_SECONDS / max(time_of(call, 1, device), 1e-9)))


def time_of(call: Call, repeats: int, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / repeats
