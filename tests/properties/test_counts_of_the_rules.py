"""Tests the delta rules, their stages and gradients with counts at each constant of their kernels and loops.

test_counts_at_kernel_constants.py has the other ops. Here value heads are a multiple of key heads, boundaries grow, and
a kernel has the sizes of heads as template arguments, so that one of other sizes would take seconds to compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.entries import algorithms_of, fields_of
from tests.helpers.variations import assert_exact_everywhere, random_of, some
from torch_gdn_check.registry import REGISTRY

NEAR = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
LONG = [255, 256, 257, 1024, 1057]
SIZES_OF_HEADS = (1, 33, 60, 100, 128, 192)
LARGEST = {"gdn_decode_": (128, 192)}  # K and V; of other ops 256 and 512
PAIRS = 2  # of sizes, in a run
FEW, SOME = 2, 2  # fields of a run, and counts of each
Change = Callable[[Any, int], Any]


def packed(point: Any, *lengths: int) -> Any:
    boundaries = (0, *itertools.accumulate(lengths))
    return replace(point, boundaries=boundaries, tokens=boundaries[-1], batch=1)


# What the count of a field does to a point. Other counts are small, so that float64 takes a fraction of a second.
CHANGES: dict[str, Change] = {
    "tokens": lambda point, n: replace(point, tokens=n, batch=1, H=1, HV=2),
    "batch": lambda point, n: replace(point, batch=n, tokens=3, H=1, HV=1),
    "key heads": lambda point, n: replace(point, H=n, HV=2 * n, tokens=3, batch=1),
    "value heads": lambda point, n: replace(point, H=1, HV=n, tokens=3, batch=1),
}
PACKED: dict[str, Change] = {
    "lengths": lambda point, n: packed(point, n, 0, 3, n),
    "sequences": lambda point, n: packed(point, *((i + 1) % 3 for i in range(n))),
}
RULES = [op for op, entry in REGISTRY.items() if {"K", "V"} <= fields_of(entry)]


def drawn_points(op: str) -> Iterator[tuple[str, Any]]:
    """Yields points with what was counted. Autograd in float64 takes minutes for a thousand tokens."""
    entry, draw = REGISTRY[op], random_of("counts", op)
    small = replace(entry.small, K=16, V=8)
    algorithms = algorithms_of(op) if "return_intermediate_states" in entry.arguments else (None,)
    changes = CHANGES | (PACKED if entry.packable else {})
    for field in some([*changes], FEW, "fields", op):
        for n in some(NEAR + LONG if field == "tokens" else NEAR, SOME, "numbers", op, field):
            yield f"{n} of {field}", replace(changes[field](small, n), algorithm=draw.choice(algorithms))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", RULES)
def test_counts_of_the_rules(op: str) -> None:
    entry = REGISTRY[op]
    for what, point in drawn_points(op):
        assert_exact_everywhere(entry, point, entry.call(point), what)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", RULES)
def test_sizes_of_heads(op: str) -> None:
    """The CPU takes any sizes without compiling. Each run has the largest ones and some other pairs."""
    entry, most = REGISTRY[op], LARGEST.get(op, (256, 512))
    pairs = itertools.product(*([n for n in SIZES_OF_HEADS if n < size] + [size] for size in most))
    for K, V in {most, *some([*pairs], PAIRS, "sizes", op)}:
        point = replace(entry.small, K=K, V=V, batch=1, H=1, HV=2)
        assert_exact_everywhere(entry, point, entry.call(point), devices=("cpu",))
