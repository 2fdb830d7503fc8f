"""Tests every op with more sequences, slots, heads, tokens or experts than a simdgroup has lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.entries import assert_exact, fields_of
from tests.sweeps import share_of
from torch_gdn_check.registry import REGISTRY, Point
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import OpEntry

COUNTS = ((31, 33), (32, 64), (63,), (65,), (70,))  # a run takes one of these groups; each has a count above 32


def lengths(count: int) -> list[int]:
    """Returns lengths of 0 to 2 tokens, and of 19 next to each multiple of 32, so that there are chunks."""
    return [19 if n % 32 in (0, 31) and n else (n + 1) % 3 for n in range(count)]


def points(entry: OpEntry[Any], count: int) -> Iterator[Point]:
    """Yields variants of the small point with `count` of each thing that an op counts."""
    small, known = entry.small, fields_of(entry)
    if "block_table" in entry.arguments and "queries" in known:
        for longest in (1, 9):  # few query rows run another kernel than many
            queries = tuple(min(length, longest) for length in lengths(count))
            yield replace(
                small, queries=queries, keys=tuple(q + (n + 1) % 5 for n, q in enumerate(queries)), plain=False
            )
    if "boundaries" in known and entry.packable:
        boundaries = (0, *itertools.accumulate(lengths(count)))
        yield replace(small, boundaries=boundaries, tokens=boundaries[-1])
    if {"batch", "tokens"} <= known:
        yield replace(small, batch=count, tokens=2)
    if {"HV", "tokens"} <= known:
        yield replace(small, H=count, HV=count, tokens=19, batch=1)  # in fewer, a head's dg may nearly cancel
    if {"heads", "tokens"} <= known:
        yield replace(small, heads=count, tokens=2, batch=1)
    if "T" in known:
        yield replace(small, T=count)
    if "E" in known:
        yield replace(small, E=3 * count)
    if "M" in known:
        yield replace(small, M=count)
        yield replace(small, N=count)


def scattered(call: Call) -> Call:
    """Draws slots in random order. Those near the 32nd sequence are null, and some sequences have no initial state."""
    if "state_indices" not in call:
        return call
    count = len(call["state_indices"])
    indices, flags = torch.randperm(len(call["state_pool"]))[:count], torch.rand(count) < 0.7
    indices[[n for n in (0, 30, 31, 32, 64) if n < count]] = -1
    return call | {"state_indices": indices, "has_initial_state": flags}


COUNTED = [op for op, entry in REGISTRY.items() if [*points(entry, 31)]]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("device", ["mps"], indirect=True)  # the CPU has no simdgroups
@pytest.mark.parametrize("op", COUNTED)
def test_more_than_a_simdgroup(device: torch.device, op: str) -> None:
    """A run takes one group of counts for each op's first thing, and another group for its next thing."""
    entry = REGISTRY[op]
    firsts = share_of(range(len(COUNTS)), len(COUNTS))
    for first, which in itertools.product(firsts, range(len([*points(entry, 31)]))):
        for count in COUNTS[(first + which) % len(COUNTS)]:
            point = [*points(entry, count)][which]
            assert_exact(entry, point, scattered(entry.call(point)), device)


def wrong_last(call: Call, argument: str) -> Call:
    """Makes the numbers of the last sequence or token too large for any tensor."""
    numbers = call[argument].clone().long()
    numbers[-2 if argument == "cu_seqlens" else -1] = LARGE
    return call | {argument: numbers}


HOSTILE = [(op, name) for op in COUNTED for name in dict.fromkeys(each.argument for each in REGISTRY[op].hostile)]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("device", ["mps"], indirect=True)
@pytest.mark.parametrize(("op", "argument"), HOSTILE)
def test_a_wrong_number_past_the_first_simdgroups_is_reported(device: torch.device, op: str, argument: str) -> None:
    entry, reported = REGISTRY[op], 0
    first = "(seq_lens|block_table)" if argument == "seq_lens" else argument  # too many keys need a missing block
    for point in points(entry, 70):
        call = scattered(entry.call(point))
        if argument not in call or call[argument].numel() < 70:
            continue
        entry.run(to_device(wrong_last(call, argument), device), point)
        with pytest.raises(RuntimeError, match=f"^{op}: {first}: expected .*, got .* at "):
            torch.mps.synchronize()
        reported += 1
    assert reported


SLOTTED = [op for op in COUNTED if "state_indices" in REGISTRY[op].arguments]


@pytest.mark.parametrize("device", ["mps"], indirect=True)
@pytest.mark.parametrize("op", SLOTTED)
def test_a_slot_that_an_early_sequence_has_is_reported(device: torch.device, op: str) -> None:
    """Sequence 69 of 70 has the slot of sequence 2. Sequence 68 has a slot that only a sequence without a slot has."""
    entry = REGISTRY[op]
    point = next(each for each in points(entry, 70) if len(entry.call(each)["state_indices"]) == 70)
    call = scattered(entry.call(point))
    call["state_indices"][-1] = call["state_indices"][2]
    entry.run(to_device(call, device), point)
    with pytest.raises(RuntimeError, match=rf"^{op}: state_indices: expected each slot at most once, .* at 69\b"):
        torch.mps.synchronize()
