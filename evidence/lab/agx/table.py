"""Reads and writes isa.tsv, the recorded figures of kernel variants. A change in either direction fails until it is
recorded.

`python -m evidence.proof --only apple-isa --write` records what the compiler gives. The commit says why it changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from evidence.lab.agx.compiler import PIPELINES, Compiled, Figures

TABLE = Path(__file__).with_name("isa.tsv")
NAMES = [field.name for field in fields(Figures)]
COLUMNS = ("kernel variant", *(f"{name}, {pipeline}" for pipeline in PIPELINES for name in NAMES))

Table = Mapping[str, Mapping[str, Figures | str]]  # by variant and pipeline: figures, or Mesa's failure


def table(compiled: Iterable[Compiled]) -> Table:
    return {each.name: {**each.figures, **each.failures} for each in compiled if each.figures or each.failures}


def _cells(of: Figures | str) -> list[str]:
    if isinstance(of, str):
        return [f"failed: {of}", *["-"] * (len(NAMES) - 1)]
    return [str(getattr(of, name)) for name in NAMES]


def text(versions: str, found: Table) -> str:
    rows = [list(COLUMNS)]
    for variant in sorted(found):
        rows.append([variant, *(cell for pipeline in PIPELINES for cell in _cells(found[variant][pipeline]))])
    return f"# {versions}\n" + "".join("\t".join(row) + "\n" for row in rows)


def read(content: str) -> tuple[str, Table]:
    """Returns the versions of the compilers, and the figures."""
    versions, head, *lines = content.splitlines()
    if tuple(head.split("\t")) != COLUMNS:
        raise ValueError(f"expected the columns {', '.join(COLUMNS)}, got {head!r}")
    result: dict[str, dict[str, Figures | str]] = {}
    for line in lines:
        variant, *cells = line.split("\t")
        result[variant] = {}
        for i, pipeline in enumerate(PIPELINES):
            own = cells[i * len(NAMES) : (i + 1) * len(NAMES)]
            failed = own[0].startswith("failed: ")
            result[variant][pipeline] = own[0].removeprefix("failed: ") if failed else Figures(*map(int, own))
    return versions.removeprefix("# "), result


def recorded() -> tuple[str, Table]:
    return read(TABLE.read_text()) if TABLE.exists() else ("", {})


def changed(recorded: Table, found: Table) -> list[str]:
    """Returns a line for each variant that is new, gone or different."""
    lines = [f"{name}: {TABLE.name} has no such variant" for name in sorted(found.keys() - recorded.keys())]
    lines += [f"{name}: is recorded, but no longer launched" for name in sorted(recorded.keys() - found.keys())]
    for name in sorted(found.keys() & recorded.keys()):
        of = [_change(pipeline, recorded[name][pipeline], found[name][pipeline]) for pipeline in PIPELINES]
        if any(of):
            lines.append(f"{name}: {'; '.join(filter(None, of))}")
    return lines


def _change(pipeline: str, before: Figures | str, after: Figures | str) -> str:
    if before == after:
        return ""
    if isinstance(before, str) or isinstance(after, str):
        return f"{pipeline} {before} -> {after}"
    differences = [
        f"{name.replace('_', ' ')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in NAMES
        if getattr(before, name) != getattr(after, name)
    ]
    return f"{pipeline} {', '.join(differences)}"


def compiled_figures(of: Mapping[str, Figures | str]) -> list[Figures]:
    return [each for each in of.values() if isinstance(each, Figures)]


def spilling(found: Table) -> list[str]:
    """Returns variants that spill in every pipeline that compiles. We do not believe a spill in one pipeline alone."""
    taken = {name: compiled_figures(of) for name, of in found.items()}
    return sorted(name for name, each in taken.items() if each and all(figures.spills for figures in each))
