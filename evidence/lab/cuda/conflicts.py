"""Counts threadgroup memory's bank conflicts with the GPU's counters. Nsight Compute runs one case of each kernel."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.lab.cuda.record import CaseRecord

LIMIT = 240.0  # seconds
COUNTED = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum",
)
ACCESSES = {"loads": "ld", "stores": "st"}


class NoCounters(RuntimeError):
    """Raised if Nsight Compute is not installed, or may not read the counters."""


@dataclass(frozen=True)
class Conflicts:
    """The shares of wavefronts that only conflicts cause."""

    kernel: str
    loads: float
    stores: float


def first_of_each_kernel(cases: Sequence[CaseRecord]) -> list[CaseRecord]:
    """Returns the first cases that together launch every kernel in each of its element types."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for case in cases:
        own = {(launch.kernel, next(iter(launch.arguments), "")) for launch in case.launches}
        if not case.floor_bytes and not case.is_wrong and own - seen:
            seen |= own
            chosen.append(case)
    return chosen


def parsed(text: str) -> list[Conflicts]:
    """Reads each kernel variant's launch with the most wavefronts from ncu's raw page in CSV."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        raise NoCounters(f"expected counters, got '{text[-300:].strip()}'")
    most: dict[str, tuple[float, Conflicts]] = {}
    for row in list(csv.DictReader(lines))[1:]:  # the first row has the units
        shares, wavefronts = [], 0.0
        for access in ACCESSES.values():
            extra, whole = (float(row[name.format(access)].replace(",", "")) for name in COUNTED)
            shares.append(extra / whole if whole else 0.0)
            wavefronts += whole
        name = row["Kernel Name"].split("(")[0]
        if name not in most or wavefronts > most[name][0]:
            most[name] = (wavefronts, Conflicts(name, *shares))
    return [result for _, result in most.values()]


def measured(record: Path, cubins: Path) -> list[Conflicts]:
    program = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not program:
        raise NoCounters("ncu is missing: NVIDIA's Nsight Compute has it")
    metrics = ",".join(name.format(access) for access in ACCESSES.values() for name in COUNTED)
    replay = [sys.executable, "-m", "evidence.lab.cuda.replay", str(record), str(cubins), "kernels"]
    command = [program, "--clock-control", "none", "--metrics", metrics, "--csv", "--page", "raw", *replay]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise NoCounters(f"expected ncu's end within {LIMIT:.0f} s, got none") from None
    return parsed(done.stdout + done.stderr)
