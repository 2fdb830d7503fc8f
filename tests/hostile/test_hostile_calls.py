"""Tests invalid values for every argument of every op: both devices refuse it clearly or agree on a result."""

from __future__ import annotations

import collections

import pytest
import torch

from tests.hostile.changes import OPS, SCALARS, Hostile, hostile_calls, schema_of
from tests.hostile.outcomes import Outcome, difference, disagreement, is_clear
from tests.sweeps import share_of

KINDS = ("dtypes", "shapes", "layouts", "values", "kinds", "scalars", "aliases")
CALLS = {op: list(hostile_calls(op)) for op in OPS}
NUMBER = 20_000  # the least number; no other test would notice a lost kind of change


@pytest.mark.sweep(1)
@pytest.mark.parametrize("device", ["mps"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_both_devices_do_the_same(device: torch.device, op: str, kind: str) -> None:
    calls = share_of([hostile for hostile in CALLS[op] if hostile.kind == kind], 60)
    result = [disagreement(hostile, device) for hostile in calls]
    assert [each for each in result if each] == []


def test_the_number_of_calls() -> None:
    numbers = collections.Counter(hostile.kind for calls in CALLS.values() for hostile in calls)
    assert set(numbers) == set(KINDS)
    assert sum(numbers.values()) >= NUMBER, numbers


@pytest.mark.parametrize("op", OPS)
def test_every_argument_is_tried(op: str) -> None:
    tried = collections.Counter(hostile.argument for hostile in CALLS[op])
    assert {each.name for each in schema_of(op).arguments} == set(tried)
    assert min(tried.values()) >= min(len(values) for values in SCALARS.values())


def hostile(op: str = "l2norm", argument: str = "x") -> Hostile:
    return Hostile(op, "batch", argument, "values", "all nan", lambda call: call[argument])


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        ("l2norm: x: expected a floating dtype, got int32", True),
        ("gdn::l2norm: x: expected a dense tensor, got one of layout Sparse", True),
        ("gdn::l2norm() Expected a value of type 'Tensor' for argument 'x' but instead found type 'int'.", True),
        ("l2norm: y: expected something, got nothing", False),
        ("l2norm: x: wrong", False),
        ("x INTERNAL ASSERT FAILED: argument 'x'", False),
        ("tensor does not have a device", False),
    ],
)
def test_what_is_clear(message: str, clear: bool) -> None:
    assert is_clear(hostile(), ValueError(message)) == clear


def test_what_is_a_difference() -> None:
    x, nan = torch.ones(4), torch.tensor([1.0, torch.nan, 1, 1])
    assert not difference(x, x + 1e-6, 1e-5) and difference(x, x + 1e-4, 1e-5)
    assert not difference(x, nan, 1e-5) and difference(x, 1.1 * nan, 1e-5)
    assert difference(x, x[:3], 1e-5) and difference(x, x.half(), 1e-5) and difference(x.int(), 2 * x.int(), 1e-5)


def test_one_refusal_is_a_disagreement(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Outcome(error=ValueError("l2norm: x: expected a tensor, got it"))
    ends = {"cpu": Outcome([torch.ones(3)]), "mps": refusal}
    monkeypatch.setattr("tests.hostile.outcomes.outcome", lambda _, device: ends[device.type])
    assert "gives a result" in disagreement(hostile(), torch.device("mps"))
