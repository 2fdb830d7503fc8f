"""Knows the chips of Macs with Apple silicon: memory bandwidth, GPU cores and memory sizes.

This module imports the standard library alone, because arguments of commands are checked before PyTorch is imported.
"""

import re
from dataclasses import dataclass

LANES = 128  # multiply-adds per GPU core and clock in float32 and in float16 (github.com/philipturner/metal-benchmarks)
# The same of M5's matrix units in float16: measured on an A19, 15 October 2025 (tzakharko.github.io/
# apple-neural-accelerators-benchmark). Apple's announcement of M5 says more than four times M4's.
MATRIX_LANES = 512
FASTEST_CLOCK = 1.6e9  # above the clocks that were reported: M1 1.30, M2 1.40 (github.com/philipturner/applegpuinfo,
# issues 2 and 10) and M5 1.58 GHz


@dataclass(frozen=True)
class Mac:
    """A chip in one of its variants."""

    chip: str  # the name that macOS gives it, without "Apple"
    bandwidth: int  # GB (10^9 bytes) per second between memory and chip, as Apple publishes it
    cores: int  # the most GPU cores of this variant
    memories: tuple[int, ...]  # the sizes of memory that it is sold with, in Apple's GB

    @property
    def name(self) -> str:
        return f"{self.chip}, {self.cores} GPU cores"

    @property
    def flops(self) -> float:
        """Float operations per second that no product exceeds."""
        lanes = MATRIX_LANES if self.chip.startswith("M5") else LANES
        return 2.0 * lanes * self.cores * FASTEST_CLOCK


# Apple's technical specifications: support.apple.com/111883 and its like for each Mac; of M5 Pro and Max,
# Apple's announcement of 3 March 2026. Memory sizes are also in github.com/huggingface/huggingface.js/pull/1937.
# Where a chip has two bandwidths, the memory size tells them apart.
MACS = (
    Mac("M1", 68, 8, (8, 16)),
    Mac("M1 Pro", 200, 16, (16, 32)),
    Mac("M1 Max", 400, 32, (32, 64)),
    Mac("M1 Ultra", 800, 64, (64, 128)),
    Mac("M2", 100, 10, (8, 16, 24)),
    Mac("M2 Pro", 200, 19, (16, 32)),
    Mac("M2 Max", 400, 38, (32, 64, 96)),
    Mac("M2 Ultra", 800, 76, (64, 128, 192)),
    Mac("M3", 100, 10, (8, 16, 24)),
    Mac("M3 Pro", 150, 18, (18, 36)),
    Mac("M3 Max", 300, 30, (36, 96)),
    Mac("M3 Max", 400, 40, (48, 64, 128)),
    Mac("M3 Ultra", 819, 80, (96, 256, 512)),
    Mac("M4", 120, 10, (16, 24, 32)),
    Mac("M4 Pro", 273, 20, (24, 48, 64)),
    Mac("M4 Max", 410, 32, (36,)),
    Mac("M4 Max", 546, 40, (48, 64, 128)),
    Mac("M5", 153, 10, (16, 24, 32)),
    Mac("M5 Pro", 307, 20, (24, 48, 64)),
    Mac("M5 Max", 460, 32, (36,)),
    Mac("M5 Max", 614, 40, (48, 64, 128)),
)
CHIPS = tuple(dict.fromkeys(mac.chip for mac in MACS))
WRITTEN = re.compile(r"(?:apple\s+)?(m\d+(?:\s+[a-z]+)?)(?:\s+(\d+)(?:\s*gb)?)?", re.IGNORECASE)


def variants(chip: str) -> list[Mac]:
    """Returns the variants of a chip as macOS names it, such as "Apple M4 Max"; none for a chip that is not known."""
    return [mac for mac in MACS if mac.chip.lower() == chip.lower().removeprefix("apple ").strip()]


def find(text: str) -> tuple[Mac, int | None]:
    """Returns the Mac that a text such as "M4 Max" or "M4 Max 128" means, and its memory in Apple's GB.

    Without a memory size, it is the variant with the highest bandwidth.

    Raises:
        ValueError: If no Mac has this chip, or none with this chip has this much memory.
    """
    read = WRITTEN.fullmatch(text.strip())
    known = variants(" ".join(read[1].split())) if read else []
    if read is None or not known:
        raise ValueError(f'expected a chip, and perhaps its GB of memory, such as "M4 Max 128", got {text!r}. '
                         f"Known chips: {', '.join(CHIPS)}")  # fmt: skip
    if read[2] is None:
        return max(known, key=lambda mac: mac.bandwidth), None
    memory = int(read[2])
    for mac in known:
        if memory in mac.memories:
            return mac, memory
    sizes = sorted(size for mac in known for size in mac.memories)
    raise ValueError(f"expected {known[0].chip} with {', '.join(map(str, sizes))} GB, got {text!r}")
