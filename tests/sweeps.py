"""Sweeps: tests with many cases, of which one run takes a sample.

    @pytest.mark.sweep(4)                  one case in 4 on each device, at least one
    @pytest.mark.sweep(4, of="capability") every case of one value in 4 of this parameter
    @pytest.mark.sweep(1, seeds=3)         every case, for one seed in 3; the same seeds for all tests of a file
    @pytest.mark.sweep(4, among="engine")  one in 4 of all cases with this word on each device, whatever their file;
                                           every case if one file is named

The sample follows from a seed: the environment variable TORCH_GDN_SWEEPS, or else the commit. The head of a run prints
it, so that the run can be repeated. A case that is named by itself always runs. `make proof` takes every case, with
TORCH_GDN_SWEEPS=all.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
VARIABLE = "TORCH_GDN_SWEEPS"


def seed_of_run() -> str:
    """Returns the seed, or "all" for every case."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    result = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "0"


def header() -> str:
    seed = seed_of_run()
    if seed == "all":
        return "sweeps: every case"
    return f"sweeps: a sample; {VARIABLE}={seed} repeats it, {VARIABLE}=all takes every case"


def value_of(item: pytest.Item, parameter: str) -> str:
    spec = getattr(item, "callspec", None)
    return str(spec.params.get(parameter, "")) if spec else ""


def drawn(name: str, seed: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def sample(names: Iterable[str], share: int, seed: str) -> set[str]:
    """Returns one name in `share`, rounded up."""
    unique = sorted(set(names), key=lambda name: drawn(name, seed))
    return set(unique[: math.ceil(len(unique) / share)])


def has_its_turn(file: str, seeds: int, seed: str) -> bool:
    return drawn(file, seed)[0] % seeds == 0


def share_of(cases: Sequence[T], share: int) -> list[T]:
    """Returns a share of the cases, for a sweep inside one test, which is marked sweep(1)."""
    seed = seed_of_run()
    if seed == "all":
        return list(cases)
    kept = sample(map(str, range(len(cases))), share, seed)
    return [case for i, case in enumerate(cases) if str(i) in kept]


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def left_out(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    result: list[pytest.Item] = []
    is_one_file = len({file_of(item) for item in items}) == 1
    sweeps: dict[tuple[str, ...], list[tuple[str, pytest.Item]]] = defaultdict(list)
    shares: dict[tuple[str, ...], int] = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is None:
            continue
        of = mark.kwargs.get("of")
        if not (is_one_file or has_its_turn(file_of(item), mark.kwargs.get("seeds", 1), seed)):
            result.append(item)
            continue
        among = mark.kwargs.get("among")
        if among and is_one_file:
            continue
        parent = item.parent.nodeid if item.parent else ""  # pytest-xdist changes an item's own
        name, function = f"{parent}::{item.name}", f"{parent}::{item.name.partition('[')[0]}"
        key = (among or function, value_of(item, "device"))
        if of:  # all tests of a file share the value of one parameter, which often makes the file's fixtures
            key = (parent.partition("::")[0], of)
        sweeps[key].append((value_of(item, of) if of else name, item))
        shares[key] = mark.args[0]
    for key, cases in sweeps.items():
        kept = sample((name for name, _ in cases), shares[key], seed)
        result += [item for name, item in cases if name not in kept]
    return result


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = seed_of_run()
    if seed == "all":
        return
    out = set(left_out(items, seed))
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
