"""Tests every op with counts below, at and above each constant of its kernels and loops: words, blocks, tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.helpers.entries import fields_of
from tests.helpers.variations import assert_exact_everywhere, plans, random_of, size_of, some, variants_of
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.registry import OpEntry

NEAR = [n for power in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024) for n in (power - 1, power, power + 1) if n > 0]
# multiples of the groups of packed weights, and counts of many words with a rest
NUMBERS = 2**18  # elements of all tensors of a call, at most
PRODUCT = 2**29  # of a point's counts, at most: a draw may make tensors that the op does not take, such as states
TRIES = 2  # counts of which a point takes the first that the op takes
OTHERS = 1  # counts that a round changes besides its own
FEW, MANY = 2, 3  # rounds of a run; AURA's tensors take long to draw
PAST = (33, 65, 129)  # pairs, of which the last is alone in its word
PAIRED = ("T", "k")  # kernels count the pairs of a token and an expert, so that these have a product
REFUSED = (ValueError, TypeError, RuntimeError, IndexError, AssertionError, KeyError, ZeroDivisionError)
COUNTS = sorted({*NEAR, 24, 96, 160, 192, 288, 1056, 1088})
STRATA = [[n for n in COUNTS if low <= n < end] for low, end in ((1, 14), (14, 90), (90, 1000), (1000, 2000))]


LEFT_OUT = {"bits", "shared_bits", "group", "chunk_size", "fused_chunk_size", "longest", "gap"}  # they count nothing


def counts_of(entry: OpEntry[Any]) -> list[tuple[str, int | None]]:
    """Returns the point's fields that are counts, and the places in those that are several counts."""
    result: list[tuple[str, int | None]] = []
    for each in fields(entry.small):
        value = getattr(entry.small, each.name)
        if each.name in LEFT_OUT:
            continue
        if type(value) is int:
            result.append((each.name, None))
        elif isinstance(value, tuple):
            result += [(each.name, i) for i in range(len(value))]
    return result


def with_count(point: Any, field: str, place: int | None, count: int) -> Any:
    """Returns the point with this count. A sequence has at least as many keys as queries."""
    if place is None:
        return replace(point, **{field: count})
    values = list(getattr(point, field))
    values[place % len(values)] = count
    point = replace(point, **{field: tuple(values)})
    if field in ("queries", "keys") and isinstance(point.keys, tuple):
        point = replace(point, keys=tuple(map(max, point.queries, point.keys)))
    return point


def product_of(point: Any, counts: list[tuple[str, int | None]]) -> int:
    """Returns the product of the point's counts, with the sum of several counts of one field."""
    values = (getattr(point, name) for name in {name for name, _ in counts})
    return math.prod(max(1, sum(value) if isinstance(value, tuple) else value) for value in values)


def drawn_points(op: str) -> Iterator[Any]:
    """Yields a point for each field and order of magnitude. Some other fields have other counts, if the op takes them.

    Only kernels of the registry's points run, because each other one would take seconds to compile.
    """
    entry, draw = REGISTRY[op], random_of("counts", op)
    known = set().union(*(variants_of(entry, point, entry.call(point)) for point in plans(op)))

    def is_taken(point: Any) -> bool:
        if product_of(point, counts_of(entry)) > PRODUCT:
            return False
        try:
            call = entry.call(point)
            return size_of(call) <= NUMBERS and variants_of(entry, point, call) <= known
        except REFUSED:
            return False

    def changed(point: Any, field: tuple[str, int | None], near: list[int]) -> Any:
        """Returns the point with one of some counts that the op takes, or as it is."""
        tried = (with_count(point, *field, count) for count in draw.sample(near, TRIES))
        return next(filter(is_taken, tried), point)

    counts = counts_of(entry)
    rounds = [(field, near) for field in counts for near in STRATA]
    limit = FEW if "trellis" in fields_of(entry) else MANY
    for turn, (field, near) in enumerate(some(rounds, limit, "rounds", op)):
        point = changed(plans(op)[turn % len(plans(op))], field, near)
        for other in draw.sample(counts, min(len(counts), OTHERS)):
            point = point if other == field else changed(point, other, COUNTS)
        yield point
    for pairs in (draw.choice(PAST), draw.choice(NEAR)) if {*PAIRED} <= fields_of(entry) else ():
        factors = [(pairs // k, k) for k in range(1, 9) if pairs % k == 0]
        points = [replace(point, T=T, k=k) for point in plans(op) for T, k in factors]
        yield from itertools.islice(filter(is_taken, draw.sample(points, len(points))), 2)


# test_counts_of_the_rules.py has the rules.
COUNTED = [op for op, entry in REGISTRY.items() if counts_of(entry) and not {"K", "V"} <= fields_of(entry)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", COUNTED)
def test_counts(op: str) -> None:
    entry = REGISTRY[op]
    for point in drawn_points(op):
        call = entry.call(point)
        exact = entry.exact_outputs(call)
        if all(x.isfinite().all() for x in exact.values()):  # a block whose keys are all masked has no maximum
            assert_exact_everywhere(entry, point, call, exact=exact)
