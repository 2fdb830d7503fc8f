"""Prints two reports side by side: `python -m torch_gdn check --compare A B`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_gdn_check.report import FORMAT, leaves, share, short
from torch_gdn_check.steps import COMPILE, FACTS, PASS, PROBE

Report = dict[str, Any]
Rows = dict[str, str]  # the text of a report, by the name of a line
WIDTH = 60  # per value


def load(path: Path) -> Report:
    try:
        report: Report = json.loads(path.read_text())
        known = report["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--compare: expected a report that `torch_gdn check` wrote, got {path}: {error!r}") from error
    if known != FORMAT:
        raise ValueError(f"--compare: expected a report of format {FORMAT}, got {path} of format {known}")
    return report


def said(report: Report) -> Rows:
    """Lists facts and measured figures, and how much of its bound each comparison with float64 used."""
    rows: Rows = {"status": report["status"], "seconds": short(report["seconds"])}
    for result in report["results"]:
        name = " ".join(filter(None, (result["section"], result["group"], result["case"])))
        figures = result["figures"]
        if result["section"] == FACTS:
            figures = {part: figures.get(part) or {} for part in ("versions", "machine")}
        elif result["section"] == PROBE:
            figures = figures.get("measured", {})
        if "tensors" in figures:
            used = max(
                share({name: float(x) for name, x in each.items() if name != "of"})
                for each in figures["tensors"].values()
            )
            rows[name] = f"{result['status']}, {short(used)} of the bound"
            continue
        rows[name] = result["status"]
        if result["section"] != COMPILE:
            rows |= {f"{name}: {leaf}": short(value) for leaf, value in leaves(figures)}
    return rows


def side_by_side(first: Path, second: Path) -> str:
    """Lists each line that differs or has a figure, and omits those that pass in both without one."""
    one, other = said(load(first)), said(load(second))
    names = [name for name in dict.fromkeys([*one, *other]) if not one.get(name) == other.get(name) == PASS]
    table = [("", first.name, second.name)]
    table += [(name, one.get(name, "not there"), other.get(name, "not there")) for name in names]
    table = [(name, a[:WIDTH], b[:WIDTH]) for name, a, b in table]
    widths = [max(len(row[i]) for row in table) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in table)
