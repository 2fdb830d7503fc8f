"""Computes a lower bound of the instructions that a simdgroup issues, from the simulated device's counts of a run.

A listing has loops, and nothing runs it, so we do not know how often each block runs. But the device counts barriers,
products, accesses and sums of floats. Each of these gets a price in instructions, and the run itself gets one too. On
any path through the listing, a simdgroup issues at least as many instructions as the prices of its operations add up
to. We take the prices with the largest sum for the listing's own mixture, if each loop runs eight times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# What is counted, and the instructions for it in the listing. `start` is the run itself, which has none.
KINDS = {
    "start": (),
    "float": ("ffma", "fmul", "fadd", "hfma", "hmul", "hadd"),
    "device": ("device_load", "device_store", "atomic"),
    "threadgroup": ("local_load", "local_store", "local_atomic"),
    "barrier": ("threadgroup_barrier",),
    "matrix": ("simd_matrix_fmadd16", "simd_matrix_fmadd32"),
}
ROUNDS = 8  # the rounds of each loop that the mixture assumes
NONE = 1e-7  # rounding may leave this much of 0


class Block(NamedTuple):
    instructions: int
    counts: tuple[int, ...]  # how often each kind occurs
    depth: int  # number of loops around it
    following: tuple[int, ...]


def prices(listing: str) -> dict[str, int]:
    """Returns the price of each kind, in hundredths of an instruction."""
    blocks = blocks_of(listing)
    mixture = [sum(block.counts[k] * ROUNDS**block.depth for block in blocks) for k in range(len(KINDS))]
    most = sum(block.instructions for block in blocks)
    ways = [[float(k == kind) for k in range(len(KINDS))] for kind in range(len(KINDS))]
    costs = [float(most if total else 0) for total in mixture]
    while True:
        asked = dearest(ways, costs, mixture)
        cycle = cycle_below(blocks, asked)
        if not cycle:
            return {kind: int(100 * price + NONE) for kind, price in zip(KINDS, asked, strict=True)}
        ways.append([float(sum(blocks[i].counts[k] for i in cycle)) for k in range(len(KINDS))])
        costs.append(float(sum(blocks[i].instructions for i in cycle)))


def blocks_of(listing: str) -> list[Block]:
    """Returns blocks in the listing's order. The next block may always follow, because lanes that diverge take both
    sides in turn. The first block follows the last, so that a whole run is a cycle, as a loop is."""
    result = re.findall(r"^block(\d+) \{\n(.*?)^\}([^\n]*)", listing, re.MULTILINE | re.DOTALL)
    place = {name: i for i, (name, _, _) in enumerate(result)}
    following = []
    for i, (_, _, ends) in enumerate(result):
        after = {place[name] for name in re.findall(r"block(\d+)", ends.partition("from")[0]) if name in place}
        following.append(tuple(sorted(after | {i + 1} if after and i + 1 < len(result) else after or {0})))
    loops = [(after, i) for i, each in enumerate(following) for after in each if 0 < after <= i]
    blocks = []
    for i, (_, body, _) in enumerate(result):
        names = re.findall(r"^\s+(?:[^=\n]* = )?(\w+)", body, re.MULTILINE)
        counts = [sum(name in of for name in names) for of in KINDS.values()]
        counts[0] = int(i == 0)
        depth = sum(first <= i <= last for first, last in loops)
        blocks.append(Block(len(names), tuple(counts), depth, following[i]))
    return blocks


def cycle_below(blocks: Sequence[Block], asked: Sequence[float]) -> list[int]:
    """Returns the blocks of a cycle that has fewer instructions than its prices add up to, or an empty list."""
    owed = [block.instructions - sum(p * n for p, n in zip(asked, block.counts, strict=True)) for block in blocks]
    least, before = [0.0] * len(blocks), [-1] * len(blocks)
    for _ in range(len(blocks) + 1):
        last = -1
        for i, block in enumerate(blocks):
            for after in block.following:
                if least[i] + owed[after] < least[after] - NONE:
                    least[after], before[after], last = least[i] + owed[after], i, after
        if last < 0:
            return []
        cycle = _cycle_among(before)
        if cycle:
            return cycle
    raise AssertionError("a shortest way longer than there are blocks has a cycle")


def _cycle_among(before: Sequence[int]) -> list[int]:
    seen = [-1] * len(before)
    for start in range(len(before)):
        way, i = [], start
        while i >= 0 and seen[i] < 0:
            seen[i] = start
            way.append(i)
            i = before[i]
        if i >= 0 and seen[i] == start:
            return way[way.index(i) :]
    return []


def dearest(ways: Sequence[Sequence[float]], costs: Sequence[float], mixture: Sequence[float]) -> list[float]:
    """Returns the prices with the largest sum for the mixture that exceed no path's cost, by the simplex method."""
    kinds, rows = len(mixture), len(ways)
    table = [[*way, *(float(i == j) for j in range(rows)), costs[i]] for i, way in enumerate(ways)]
    gain = [-float(n) for n in mixture] + [0.0] * (rows + 1)
    basis = list(range(kinds, kinds + rows))
    while (enters := next((j for j in range(kinds + rows) if gain[j] < -NONE), None)) is not None:
        limits = [(row[-1] / row[enters], basis[i], i) for i, row in enumerate(table) if row[enters] > NONE]
        leaves = min(limits)[2]
        pivot = table[leaves] = [value / table[leaves][enters] for value in table[leaves]]
        for i, row in enumerate(table):
            if i != leaves:
                table[i] = [a - row[enters] * b for a, b in zip(row, pivot, strict=True)]
        gain = [a - gain[enters] * b for a, b in zip(gain, pivot, strict=True)]
        basis[leaves] = enters
    asked = [0.0] * (kinds + rows)
    for i, variable in enumerate(basis):
        asked[variable] = table[i][-1]
    return asked[:kinds]
