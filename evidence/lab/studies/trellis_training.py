"""Trains the tables of `torch_gdn.aura.trellis` on normal values.

    python -m evidence.lab.studies.trellis_training   # writes trellis.json into torch_gdn/aura in about five minutes

Each round encodes fresh values. It makes each label the mean of the values that chose its window, and of the negatives
of those that chose its complement (Lloyd's method for a trellis: Stewart, Gray, Linde 1982). It ends in one of many
local minima, so the best of several starts, tables of random normal labels, goes on with more values. Starts whose
labels are spread evenly over a state's choices end 8 % worse, and odd tables no worse than others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from torch_gdn.aura import trellis
from torch_gdn.reference.trellis import windows

FILE = Path(trellis.__file__).with_name(trellis.FILE)
LENGTH = 128  # values per vector
JUDGED = 12345  # the seed of the values that judge starts and tables


class Effort(NamedTuple):
    starts: int
    rounds: int
    vectors: int  # per round
    last_rounds: int
    last_vectors: int


EFFORTS = {6: Effort(16, 50, 512, 20, 4096), 8: Effort(6, 50, 512, 20, 4096), 10: Effort(2, 40, 512, 10, 4096)}


def train(window: int, bits: int, effort: Effort) -> Tensor:
    """Returns the first half of the best table."""
    judged = normal(1024, torch.Generator().manual_seed(JUDGED))
    candidates = []
    for seed in tqdm(range(effort.starts), desc=f"windows of {window} bits, {bits} new", unit="start"):
        generator = torch.Generator().manual_seed(seed)
        half = torch.randn(1 << (window - 1), generator=generator)
        for _ in range(effort.rounds):
            half = improved(half, bits, normal(effort.vectors, generator))
        candidates.append(half)
    best = min(candidates, key=lambda half: squared_error(trellis.odd(half), bits, judged))
    generator = torch.Generator().manual_seed(effort.starts)
    for _ in range(effort.last_rounds):
        best = improved(best, bits, normal(effort.last_vectors, generator))
    return best


def normal(vectors: int, generator: torch.Generator) -> Tensor:
    return torch.randn(vectors, LENGTH, generator=generator)


def improved(half: Tensor, bits: int, x: Tensor) -> Tensor:
    """Makes each label the mean of the values that chose it. A label that no value chose stays."""
    table = trellis.odd(half)
    chosen = windows(trellis.encode(x, table, bits), table, bits).flatten()
    total = torch.zeros(len(table), dtype=torch.float64).index_add_(0, chosen, x.flatten().double())
    count = torch.bincount(chosen, minlength=len(table))
    total, count = total - total.flip(0), count + count.flip(0)
    means = torch.where(count > 0, total / count.clamp(min=1), table.double())
    return means[: len(half)].float()


def squared_error(table: Tensor, bits: int, x: Tensor) -> float:
    """Returns the mean squared error over x."""
    decoded = trellis.decode(trellis.encode(x, table, bits), table, bits)
    return (decoded - x).double().square().mean().item()


def as_bytes(half: Tensor) -> dict[str, object]:
    """Returns labels as whole numbers of 8 bits, and the value that 1 represents."""
    step = float(f"{half.abs().max().item() / 127:.7g}")
    return {"step": step, "labels": (half / step).round().int().tolist()}


def main() -> None:
    rows = []
    for window, rates in trellis.RATES.items():
        halves = {bits: train(window, bits, EFFORTS[window]) for bits in rates}
        lines = [f'  "{bits}": {json.dumps(as_bytes(half))}' for bits, half in halves.items()]
        rows.append(f'"{window}": {{\n' + ",\n".join(lines) + "\n}")
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    judged = normal(2000, torch.Generator().manual_seed(JUDGED))
    for window, rates in trellis.RATES.items():
        for bits in rates:
            error = squared_error(trellis.table(window, bits), bits, judged)
            print(f"windows of {window} bits, {bits} new: squared error {error:.5f}")


if __name__ == "__main__":
    main()
