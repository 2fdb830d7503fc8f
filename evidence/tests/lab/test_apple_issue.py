"""Prices a run's counts in instructions: no path through a listing may issue fewer."""

from __future__ import annotations

import random

import pytest

from evidence.lab.agx import issue

FLOAT, LOAD, TILE, PRODUCT = (
    "r1 = ffma r1, r2, r3",
    "r4 = device_load r5:r6",
    "r7 = local_load r8",
    "simd_matrix_fmadd32",
)
OTHER = "r9 = iadd r9, #1, #0"
Blocks = list[tuple[list[str], list[int]]]  # for each block, its instructions and its successors


def listing(blocks: Blocks) -> str:
    text = ""
    for i, (body, after) in enumerate(blocks):
        ends = f" -> {' '.join(f'block{j}' for j in after)} " if after else ""
        text += f"block{i} {{\n" + "".join(f"   {line}\n" for line in body) + f"}}{ends} from block0\n"
    return text


def others(count: int) -> list[str]:
    return [OTHER] * count


def test_without_loops_a_run_costs_its_shortest_way() -> None:
    blocks: Blocks = [([LOAD, *others(4)], [1, 2]), (others(7), [3]), (others(2), [3]), (others(3), [])]
    result = issue.prices(listing(blocks))
    assert result["start"] + result["device"] == 100 * (5 + 2 + 3)
    assert not any(result[kind] for kind in ("float", "threadgroup", "barrier", "matrix"))


def test_what_a_loop_does_pays_for_the_loop() -> None:
    """A round has 2 sums in 10 instructions, an access in 30, or both in 38 if lanes diverge."""
    blocks: Blocks = [
        (others(6), [1]),
        (others(2), [2, 3]),
        ([FLOAT, FLOAT, *others(6)], [4]),
        ([TILE, *others(27)], [4]),
        ([], [1, 5]),
        (["stop"], []),
    ]
    assert issue.prices(listing(blocks)) == {
        "start": 700,
        "float": 500,
        "device": 0,
        "threadgroup": 2800,
        "barrier": 0,
        "matrix": 0,
    }


def test_lanes_that_part_take_both_sides_in_turn() -> None:
    """A round that costs 2 instructions more than one side has the sums of both sides."""
    blocks: Blocks = [
        (others(1), [1]),
        (others(8), [2, 3]),
        ([FLOAT], [4]),
        ([FLOAT], [4]),
        ([], [1, 5]),
        (["stop"], []),
    ]
    assert issue.prices(listing(blocks))["float"] == 500


def random_listing(draw: random.Random) -> Blocks:
    """Any block may lead to any other. The last one ends."""
    count = draw.randint(2, 7)
    lines = [FLOAT, LOAD, TILE, PRODUCT, "threadgroup_barrier", OTHER, OTHER]
    blocks: Blocks = []
    for i in range(count - 1):
        body = [draw.choice(lines) for _ in range(draw.randint(0, 6))]
        blocks.append((body, sorted({i + 1, draw.randint(1, count - 1)})))
    return [*blocks, (["stop"], [])]


@pytest.mark.parametrize("seed", range(40))
def test_no_way_through_a_listing_issues_fewer_than_its_prices(seed: int) -> None:
    draw = random.Random(seed)
    blocks = random_listing(draw)
    result = issue.prices(listing(blocks))
    assert all(price >= 0 for price in result.values()) and any(result.values())
    for _ in range(200):
        at, issued, owed = 0, 0, result["start"]
        for _ in range(100):
            body, after = blocks[at]
            issued += len(body)
            for line in body:
                owed += sum(result[kind] for kind, names in issue.KINDS.items() if any(name in line for name in names))
            if not after:
                assert owed <= 100 * issued
                break
            at = draw.choice(after)
