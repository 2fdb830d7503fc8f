"""Makes the tables of docs/numerics.md: what decoding a value of the trellis code costs, by how its table is stored.

    python -m evidence.lab.studies.trellis_cost

The error is the mean squared error of 256,000 normal values. For accesses, 32 lanes each load a label of a random
window from threadgroup memory with 32 banks of 4 bytes. The figure is the mean number of words that the busiest bank
delivers; lanes that load the same word share it. Instructions are counted by hand, for one value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from evidence.lab.studies import trellis_training
from torch_gdn.aura import trellis

LANES, BANKS, WORD = 32, 32, 4
DRAWS = 4000


class Storage(NamedTuple):
    name: str
    entries: int  # a divisor of the number of windows; half for an odd table's half
    size: int  # bytes per label
    instructions: int

    def accesses(self) -> float:
        windows = torch.randint(self.entries, (DRAWS, LANES), generator=torch.Generator().manual_seed(0))
        words = torch.zeros(DRAWS, max(BANKS, self.entries * self.size // WORD), dtype=torch.int)
        words.scatter_(1, windows * self.size // WORD, 1)
        return words.unflatten(1, (-1, BANKS)).sum(1).amax(1).double().mean().item()


def storages() -> list[Storage]:
    """Returns them. Each extracts and loads. A byte is converted. For an odd table's half, the sign changes index and
    label.
    """
    result = [Storage("4 bits without a trellis, halves", 16, 2, 2)]
    for window in trellis.RATES:
        every = 1 << window
        result += [Storage(f"{window} bits, halves", every, 2, 2), Storage(f"{window} bits, bytes", every, 1, 3)]
        result.append(Storage(f"{window} bits, bytes of the first half", every // 2, 1, 6))
    return result


def main() -> None:
    print("| bits a value | window | squared error |\n|---|---|---|")
    x = trellis_training.normal(2000, torch.Generator().manual_seed(trellis_training.JUDGED))
    for window, rates in trellis.RATES.items():
        for bits in rates:
            error = trellis_training.squared_error(trellis.table(window, bits), bits, x)
            print(f"| {bits} | {window} | {error:.4f} |")
    print("\n| window and labels | bytes | accesses | instructions |\n|---|---|---|---|")
    for s in storages():
        print(f"| {s.name} | {s.entries * s.size} | {s.accesses():.1f} | {s.instructions} |")


if __name__ == "__main__":
    main()
