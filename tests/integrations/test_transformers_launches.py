"""Tests what a step of transformers' models launches after `enable()`. launches.json has the operators of each part.

`python -m tests.integrations.test_transformers_launches` rewrites launches.json.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench import drafted_launches, launches
from bench.launch_counter import ONCE, Place
from bench.launch_models import MODELS
from bench.launches import DECODE, PREFILL, Part
from tests.helpers.devices import ready

pytestmark = pytest.mark.sweep(6)

EXPECTED = Path(__file__).with_name("launches.json")
VERSION = "5.24."
STEPS = (DECODE, PREFILL)


def operators(parts: Sequence[Part]) -> dict[str, dict[str, int]]:
    return {str(part): dict(sorted(part.counts.launches.items())) for part in parts}


def differences(counted: dict[str, dict[str, int]], expected: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for part in sorted(counted.keys() | expected.keys()):
        now, before = Counter(counted.get(part, {})), Counter(expected.get(part, {}))
        if now != before:
            changes = f"in addition {dict(now - before)}, missing {dict(before - now)}"
            lines.append(f"{part}: {now.total()} launches instead of {before.total()}: {changes}")
    return lines


@pytest.mark.skipif(not version("transformers").startswith(VERSION), reason="other versions launch other operators")
@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_launches_of_each_part(name: str, what: str) -> None:
    ready("mps")
    parts = launches.count(name, what, 1, enabled=True)
    assert not differences(operators(parts), json.loads(EXPECTED.read_text(encoding="utf-8"))[name][what])
    assert launches.sums(parts)["waits"] == 0 and launches.sums(parts)["copies to the host"] == 1
    assert operators(launches.count(name, what, 8, enabled=True)) == operators(parts)


@pytest.mark.skipif(not version("transformers").startswith(VERSION), reason="other versions launch other operators")
@pytest.mark.parametrize("name", drafted_launches.MODELS)
def test_launches_with_drafts(name: str) -> None:
    """A layer launches as much for four drafts as for one, a Gated DeltaNet layer as for none, and taking drafts
    back launches nothing.
    """
    ready("mps")
    cases = ((0, True), (1, True), (4, True), (4, False))
    plain, one, four, rejected = (
        {place: each.launches for place, each in drafted_launches.count(name, *case).items() if each.total}
        for case in cases
    )
    for launched in (plain, one, four, rejected):
        launched.pop(Place(None, ONCE))
    assert one == four == rejected
    assert {place: one[place] for place in plain if place.part != "attention"} == {
        place: launched for place, launched in plain.items() if place.part != "attention"
    }


def write() -> None:
    ready("mps")
    result: dict[str, Any] = {
        name: {what: operators(launches.count(name, what, 1, enabled=True)) for what in STEPS} for name in MODELS
    }
    EXPECTED.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
