"""Tests checkpoints and the states of drafts at each size at which a kernel changes its plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.entries import algorithms_of, assert_exact, fields_of
from tests.helpers.errors import assert_close, assert_same_bits
from tests.properties.test_null_slots import BOUND, KEEPING, STEPPED, step_of, token_by_token
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import OpEntry

SIZES = ((16, 8), (96, 192), (256, 40))  # (K, V); K lies around the sizes at which lanes, tiles and chunks change
ENDS = (64, 128)  # after one chunk of every algorithm, and after several


PREFILLS = [(op, each) for op in KEEPING if "K" in fields_of(REGISTRY[op]) for each in algorithms_of(op)]


def part_of(call: Call, n: int, tokens: int) -> Call:
    """Returns the call with the first tokens of one sequence."""
    result = {name: x[n : n + 1, :tokens] if name in ("q", "k", "v", "g", "beta") else x for name, x in call.items()}
    return result | {name: call[name][n : n + 1] for name in ("state_indices", "has_initial_state")}


def checkpoints_are_exact(entry: OpEntry[Any], point: Any, device: torch.device) -> None:
    """Asserts that the states after 64 and 128 tokens of two sequences have the bits of prefills that end there, and
    that those prefills are exact.
    """
    call = entry.call(point)
    call |= {"state_indices": torch.tensor([3, 0]), "has_initial_state": torch.tensor([True, True])}
    numbers = {"checkpoint_offsets": torch.tensor(ENDS), "checkpoint_indices": torch.tensor([1, 4])}
    on_device, expected = to_device(call | numbers, device), to_device(call, device)
    entry.run(on_device, point)
    entry.run(expected, point)
    pool = expected["state_pool"]
    for n, (tokens, slot) in enumerate(zip(ENDS, (1, 4), strict=True)):
        part = part_of(call, n, tokens)
        assert_exact(entry, point, part, device)
        alone = to_device(part, device)
        entry.run(alone, point)
        pool[slot] = alone["state_pool"][int(call["state_indices"][n])]
    assert_same_bits("state_pool", on_device["state_pool"], pool)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize(("op", "algorithm"), PREFILLS)
def test_checkpoints(device: torch.device, op: str, algorithm: str, K: int, V: int) -> None:
    entry = REGISTRY[op]
    for v_first in (False, True):
        point = replace(entry.small, K=K, V=V, H=1, HV=1, tokens=150, algorithm=algorithm, state_v_first=v_first)
        checkpoints_are_exact(entry, replace(point, chunk_size=64), device)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("op", STEPPED)
def test_states_of_drafts(device: torch.device, op: str, K: int, V: int) -> None:
    entry = REGISTRY[op]
    call = step_of(replace(entry, small=replace(entry.small, K=K, V=V, H=1, HV=1)), -1, 2)
    o, pool = token_by_token(entry, call)
    on_device = to_device(call, device)
    assert_close("o", entry.run(on_device), o, BOUND)
    assert_close("state_pool", on_device["state_pool"], pool, BOUND, head_dim=1)


CONVOLUTIONS = [op for op, entry in REGISTRY.items() if {"W", "by_channel"} <= fields_of(entry)]
LENGTHS = (1, 3, 31, 0, 32, 33, 2, 63, 64, 65, 16, 17)  # around the number of tokens that a threadgroup convolves


@pytest.mark.sweep(6)
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("op", CONVOLUTIONS)
def test_boundaries_within_the_tiles_of_a_convolution(device: torch.device, op: str, W: int) -> None:
    """Sequences and segments end just before, at and after a tile's end, and within it. Tokens or channels are
    adjacent.
    """
    entry, boundaries = REGISTRY[op], (0, *itertools.accumulate(LENGTHS))
    runs = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
    for by_channel, from_state in itertools.product((False, True), (False, True)):
        point = replace(entry.small, W=W, by_channel=by_channel, from_state=from_state, tokens=boundaries[-1])
        assert_exact(entry, point, entry.call(replace(point, boundaries=boundaries)), device)
        if "seq_idx" in entry.arguments and not from_state:
            assert_exact(entry, point, entry.call(point) | {"seq_idx": runs}, device)
