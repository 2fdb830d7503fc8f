"""Runs the four tools of compute-sanitizer over a record's cases."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = {
    "memcheck": ("--padding", "64"),
    "initcheck": (),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
}
LIMIT = 400.0  # seconds
KINDS = (
    "Invalid",
    "Misaligned",
    "Uninitialized",
    "Race reported",
    "Error:",
    "Warning:",
    "Barrier",
    "Program hit",
    "Leaked",
)


@dataclass(frozen=True)
class Verdict:
    tool: str
    errors: int
    places: tuple[str, ...]  # "Invalid __global__ read of size 4 bytes, gdn/solve_tril.metal:30, 12 times"


def parsed(tool: str, text: str) -> Verdict:
    """Returns the tool's own count, and places. Raises ValueError without a summary: the tool did not finish."""
    result = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", text, re.MULTILINE)
    if not result:
        raise ValueError(f"{tool}: expected a summary, got '{text[-300:]}'")
    places: Counter[str] = Counter()
    lines = [line.lstrip("=").strip() for line in text.splitlines() if line.startswith("=")]
    for i, line in enumerate(lines):
        if line.startswith(KINDS):
            where = next((m[1] for each in lines[i : i + 4] if (m := re.search(r"in (\S+:\d+)", each))), "no place")
            places[f"{re.sub(r'0x[0-9a-f]+', 'an address', line)}, {where}"] += 1
    return Verdict(tool, int(result[-1]), tuple(f"{place}, {count} times" for place, count in places.most_common(8)))


def program() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def examine(tool: str, record: Path, cubins: Path, *what: str) -> Verdict:
    """Runs a tool. `what` has arguments of evidence.lab.cuda.replay. Raises ValueError if the tool does not finish."""
    replay = [sys.executable, "-m", "evidence.lab.cuda.replay", str(record), str(cubins), *what]
    command = [program() or "compute-sanitizer", "--tool", tool, *TOOLS[tool], "--print-limit", "50", *replay]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{tool}: expected an end within {LIMIT:.0f} s, got none") from None
    return parsed(tool, done.stdout + done.stderr)


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Merges one tool's findings over parts of the cases."""
    places = dict.fromkeys(place for verdict in verdicts for place in verdict.places)
    return Verdict(verdicts[0].tool, sum(verdict.errors for verdict in verdicts), tuple(places))
