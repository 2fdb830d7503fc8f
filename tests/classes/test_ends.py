"""Tests every op with sinks on sinks and scores that are a hundred apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.entries import assert_exact, fields_of
from tests.helpers.errors import assert_same_bits
from torch_gdn.testing import REGISTRY
from torch_gdn.testing.inputs import to_device

OF_A_HUNDRED = 100 * 2**-24  # the relative error of exp(x), where x is a float32 of that size
WITH_SINKS = [op for op, entry in REGISTRY.items() if "sinks" in entry.arguments]


@pytest.mark.parametrize("size", [1.0, 30.0], ids=["scores", "scores that are far apart"])
@pytest.mark.parametrize("op", WITH_SINKS)
def test_sinks_far_above_and_below_the_scores(device: torch.device, op: str, size: float) -> None:
    """Exponentials of the differences overflow or vanish; heads whose sink outweighs every key are nearly zeros."""
    entry = REGISTRY[op]
    point = replace(entry.small, plain=False) if "plain" in fields_of(entry) else entry.small  # plain: zeros
    call = entry.call(point)
    if "q" in call:
        call["q"] = call["q"] * size
    heads = point.HQ if "plain" in fields_of(entry) else len(call["sinks"])
    for sinks in ([-100.0, 30.0, -torch.inf, 0.0], [80.0, -1e4, 20.0, -100.0]):
        call["sinks"] = torch.tensor(sinks).repeat(heads)[:heads]
        assert_exact(entry, point, call, device, OF_A_HUNDRED)


# An op's outputs are proportional to these arguments together.
PROPORTIONAL = {"v", "u", "v_new", "h", "initial_state", "state_pool", "value_cache", "value", "up"}
SCALED = [op for op, entry in REGISTRY.items() if PROPORTIONAL & set(entry.arguments) and "W" not in fields_of(entry)]


@pytest.mark.parametrize("op", SCALED)
def test_values_at_the_ends_of_the_exponents(device: torch.device, op: str) -> None:
    """A power of two, far up and down, next to zeros, changes exponents alone, in each output that is proportional."""
    entry = REGISTRY[op]
    points = [entry.small]
    if "queries" in fields_of(entry):  # few queries, and more, in vectors
        points = [replace(entry.small, plain=False, D=128, queries=queries) for queries in ((1, 0, 1), (9, 0, 1))]
    for point in points:
        call = entry.call(point)
        names = [name for name in PROPORTIONAL & call.keys() if call[name].dtype == torch.float32]
        if "v" in names:
            call["v"] = call["v"].index_fill(1, torch.tensor([0]), 0.0)  # of a token
        if "out" in call:
            call["out"] = torch.zeros_like(call["out"])  # of rows of padding
        found = []
        for factor in (1.0, 2.0**80, 2.0**-80):
            there = to_device(call | {name: call[name] * factor for name in names}, device)
            found.append({name: x.cpu() for name, x in entry.outputs(there, entry.run(there, point)).items()})
        changed = [name for name, x in found[0].items() if not torch.equal(x, found[1][name])]
        for name in changed:
            assert_same_bits(name, found[1][name], found[0][name] * 2.0**80)
            assert_same_bits(name, found[2][name], found[0][name] * 2.0**-80)
        assert changed or not names
