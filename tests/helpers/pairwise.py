"""Finds a short list of cases in which each pair of values of two factors occurs together at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def pairs_of(indices: Mapping[str, int]) -> set[Pair]:
    return set(itertools.combinations(indices.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Takes greedily, from random cases that hold a missing pair, the one with the most missing pairs."""
    draw = random.Random(0)
    ranges = {name: range(len(values)) for name, values in factors.items()}
    missing = {((a, i), (b, j)) for a, b in itertools.combinations(factors, 2) for i in ranges[a] for j in ranges[b]}
    cases: list[Case] = []
    while missing:
        wanted = dict(min(missing))
        candidates = [{name: wanted.get(name, draw.choice(r)) for name, r in ranges.items()} for _ in range(30)]
        best = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing))
        missing -= pairs_of(best)
        cases.append({name: factors[name][i] for name, i in best.items()})
    return cases
