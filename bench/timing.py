"""Times calls of the contenders in turn, round after round, so that other load on the machine affects them all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from torch_gdn._timing import wait

Call = Callable[[], object]
LEAST_SECONDS = 1e-3  # the least time between two looks at the clock; shorter calls are repeated
LEAST_ROUNDS, MOST_ROUNDS = 3, 200
MOST_SPREAD = 0.2  # median over best round; if it is larger, the rounds disagree
ATTEMPTS = 3


class Time(NamedTuple):
    """Seconds of one call: the best round, which other load disturbed least, the median, and whether they agree."""

    best: float
    median: float
    is_steady: bool

    @classmethod
    def of(cls, rounds: list[float]) -> Time:
        best, median = min(rounds), statistics.median(rounds)
        return cls(best, median, median <= (1 + MOST_SPREAD) * best)


def measure(
    calls: Mapping[str, Call],
    device: torch.device,
    seconds: float = 1.0,
    attempts: int = ATTEMPTS,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, Time]:
    """Times each call for about `seconds`, and again if its rounds disagree. On a GPU the calls of a round are encoded
    before the host waits for the device. `before` gets a call's name ahead of each of its rounds, and is not timed.
    """
    if not calls:
        return {}
    first = {}
    for name, call in calls.items():
        before(name)
        first[name] = first_time_of(call, device)
    repeats = {name: max(1, math.ceil(LEAST_SECONDS / max(time, 1e-9))) for name, time in first.items()}

    def each() -> Iterator[dict[str, list[float]]]:
        rounds = {name: [time] if repeats[name] == 1 else [] for name, time in first.items()}
        for _ in range(attempts):
            for _ in range(MOST_ROUNDS):
                waiting = [name for name in calls if not is_done(rounds[name], repeats[name], seconds)]
                if not waiting:
                    break
                for name in waiting:
                    before(name)
                    rounds[name].append(time_of(calls[name], repeats[name], device))
            yield rounds
            rounds = {name: [] for name in calls}

    return steadiest(each())


def steadiest(attempts: Iterable[dict[str, list[float]]]) -> dict[str, Time]:
    """Returns the first attempt in which no call's rounds disagree, or else the one with the least disagreement.

    It returns a whole attempt, because the calls of one are compared with each other, and were made in turn.
    """
    result: list[dict[str, Time]] = []
    for rounds in attempts:
        times = {name: Time.of(samples) for name, samples in rounds.items()}
        if all(time.is_steady for time in times.values()):
            return times
        result.append(times)
    return min(result, key=lambda times: max(time.median / time.best for time in times.values()))


def is_done(times: list[float], repeats: int, seconds: float) -> bool:
    """Returns whether enough rounds are done: at least three, or one if it is very slow."""
    spent = sum(times) * repeats
    return spent >= seconds and (len(times) >= LEAST_ROUNDS or spent >= LEAST_ROUNDS * seconds)


def first_time_of(call: Call, device: torch.device) -> float:
    """Times the second call, because the first may compile or allocate."""
    call()
    return time_of(call, 1, device)


def time_of(call: Call, repeats: int, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - start) / repeats
