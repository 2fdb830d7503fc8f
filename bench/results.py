"""Holds the measurements: a row for each contender and size, its tables and its JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.counting import Work
from bench.timing import Time

OURS = "torch_gdn"
UNSTEADY = "(unsteady)"


@dataclass
class Row:
    section: str
    case: str  # the layer and its heads
    dtype: str
    size: int  # tokens, sequences or cached tokens, depending on the section
    contender: str
    threads: int
    seconds: float | None = None  # the best of the rounds
    median: float | None = None
    is_steady: bool = True  # False if the rounds still disagree after all attempts
    error: float | None = None  # the output's error against float64
    operations: int = 0
    bytes: int = 0
    floor: float | None = None  # seconds, from the ceilings of this run
    note: str = ""
    others: dict[str, float] = field(default_factory=dict)  # seconds of other things that the section measures
    rate: float = 0.0  # tokens per second of a server or a model
    latencies: dict[str, float] = field(default_factory=dict)  # seconds, for a server's requests
    shares: dict[str, float] = field(default_factory=dict)  # shares of the time, by part
    counts: dict[str, int] = field(default_factory=dict)  # from the simulated device

    def work(self, work: Work) -> None:
        self.operations, self.bytes = work

    def time(self, time: Time) -> None:
        self.seconds, self.median, self.is_steady = time

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self.section, self.case, self.dtype, self.size, self.threads


def ratios(rows: Iterable[Row]) -> dict[tuple[tuple[str, str, str, int, int], str], float]:
    """Returns (key, contender) -> its time divided by ours. Above 1, torch_gdn is faster."""
    timed = [row for row in rows if row.seconds is not None]
    ours = {row.key: row.seconds for row in timed if row.contender == OURS}
    return {(row.key, row.contender): row.seconds / ours[row.key] for row in timed if row.key in ours}  # type: ignore[operator]


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def marked(row: Row) -> str:
    """Returns the best time in ms, with a mark if the rounds disagree."""
    return milliseconds(row.seconds) + ("" if row.is_steady else f" {UNSTEADY}")


def cells(row: Row, over_ours: float | None) -> list[str]:
    if row.seconds is None:
        return [row.case, row.dtype, str(row.size), row.contender, "", "", "", "", "", "", "", row.note]
    share = "" if row.floor is None else f"{100 * row.floor / row.seconds:.0f} %"
    return [
        row.case,
        row.dtype,
        str(row.size),
        row.contender,
        marked(row),
        milliseconds(row.median),
        "" if row.contender == OURS or over_ours is None else f"{over_ours:.2f}",
        f"{row.operations / row.seconds / 1e9:.0f}" if row.operations else "",
        f"{row.bytes / row.seconds / 1e9:.1f}" if row.bytes else "",
        share,
        "" if row.error is None else f"{row.error:.1e}",
        row.note,
    ]


def table(rows: Sequence[Row], size_name: str) -> str:
    """Returns a table in Markdown."""
    heading = [
        "layer",
        "dtype",
        size_name,
        "",
        "ms",
        "median",
        "of ours",
        "GFLOP/s",
        "GB/s",
        "of the ceiling",
        "error",
        "",
    ]
    over_ours = ratios(rows)
    lines = [cells(row, over_ours.get((row.key, row.contender))) for row in rows]
    return markdown(heading, lines)


def summary(rows: Sequence[Row], size_name: str) -> str:
    """Returns a line per size: our time, and how many times as long each contender takes. Empty without contenders."""
    over_ours = ratios(rows)
    others = list(dict.fromkeys(row.contender for row in rows if row.seconds is not None and row.contender != OURS))
    if not others:
        return ""
    lines = []
    for row in rows:
        if row.contender != OURS or row.seconds is None:
            continue
        share = "" if row.floor is None else f"{100 * row.floor / row.seconds:.0f} %"
        times = [over_ours.get((row.key, name)) for name in others]
        start = [row.case, row.dtype, str(row.size), marked(row), share]
        lines.append(start + ["" if time is None else f"{time:.1f} x" for time in times])
    return markdown(["layer", "dtype", size_name, "ms", "of the ceiling", *others], lines)


def markdown(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(heading)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, rule, *lines))


def write_json(path: Path, system: dict[str, Any], rows: Sequence[Row]) -> None:
    content = {"version": 1, "system": system, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
