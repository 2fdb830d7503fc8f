"""Writes the report: a table for the terminal, every failure in full, and JSON to attach to an issue."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_gdn_check import expected
from torch_gdn_check.registry.bounds import Part
from torch_gdn_check.steps import COMPILE, FACTS, FAIL, PASS, PROBE, SKIPPED, USE, Result

FORMAT = 3  # the JSON's version; raised if a reader would misunderstand it


@dataclass
class Report:
    started: str  # ISO 8601
    seconds: float
    options: dict[str, Any]
    results: list[Result]
    interrupted: bool = False
    running: str = ""  # the step that runs while the report is written, or empty at the end

    @property
    def passed(self) -> bool:
        return not self.interrupted and all(result.status != FAIL for result in self.results)

    @property
    def facts(self) -> dict[str, Any]:
        return next((result.figures for result in self.results if result.section == FACTS), {})

    def json(self) -> str:
        status = UNFINISHED if self.running else PASS if self.passed else FAIL
        body = asdict(self)
        head = {"format": FORMAT, "status": status, "warnings": numbered_warnings(body["results"])}
        return json.dumps(without_nan(head | body), indent=1)

    def write(self, path: Path) -> None:
        """Replaces the file at once, so that a reader finds this report or the previous one, even if the process is
        killed.
        """
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(self.json() + "\n")
        unfinished.replace(path)

    def text(self) -> str:
        sections = [*self._facts(), "", *table(self.results), ""]
        if compared := list(expected.lines(self.results, self.facts.get("machine") or {})):
            sections += ["next to bounds and other projects:", *(f"    {line}" for line in compared), ""]
        for status, title in ((FAIL, "failed"), (SKIPPED, "skipped")):
            messages = grouped_messages(result for result in self.results if result.status == status)
            sections += [f"{title}: {where}\n{indented(text)}\n" for where, text in messages]
        counts = Counter(result.status for result in self.results)
        summary = ", ".join(f"{counts[status]} {word}" for status, word in WORDS if counts[status])
        sections += ["interrupted: the remaining steps did not run"] if self.interrupted else []
        return "\n".join([*sections, f"{'pass' if self.passed else 'FAIL'}: {summary}, in {self.seconds:.0f} s"])

    def _facts(self) -> list[str]:
        parts = {name: self.facts.get(name) or {} for name in ("versions", "system", "machine", "simulated")}
        return [
            f"{name}: {', '.join(f'{fact} {value}' for fact, value in facts.items())}"
            for name, facts in parts.items()
            if facts
        ]


UNFINISHED = "unfinished"
MOST_SHOWN = 160  # characters of a step's measurements; the JSON has all
WORDS = ((PASS, "passed"), (FAIL, "failed"), (SKIPPED, "skipped"))


def table(results: list[Result]) -> list[str]:
    """Returns one line per kernel, op or model: the number of cases, how many failed, and what was measured.

    A computed kernel has a second line, for all cases that launch it.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.section, result.group), []).append(result)
    for kernel in sorted({kernel for result in results for kernel in result.kernels}):
        groups["computed", kernel] = [result for result in results if kernel in result.kernels]
    rows = [("", "", "cases", "result", "")]
    for (section, group), members in groups.items():
        counts = Counter(result.status for result in members)
        failed = f"{counts[FAIL]} failed" if counts[FAIL] else SKIPPED if counts[SKIPPED] == len(members) else PASS
        rows.append((section, group, str(len(members)), failed, measured(section, members)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]


def measured(section: str, results: list[Result]) -> str:
    with_figures = [result for result in results if result.figures]
    if not with_figures or section in (FACTS, USE):
        return ""
    if section == COMPILE:
        return compiled(with_figures)
    if any("tensors" in result.figures for result in with_figures):
        return closest([result for result in with_figures if "tensors" in result.figures])
    figures = (result.figures["measured"] if section == PROBE else result.figures for result in with_figures)
    return "; ".join(", ".join(f"{name} {short(value)}" for name, value in leaves(each)) for each in figures)[
        :MOST_SHOWN
    ]


def compiled(results: list[Result]) -> str:
    seconds = [result.figures["compile_seconds"] for result in results]
    threads = min(result.figures["max_total_threads_per_threadgroup"] for result in results)
    text = f"{sum(seconds):.1f} s, at most {max(seconds):.2f} s; at least {threads} threads a threadgroup"
    memory = [result.figures.get("static_threadgroup_memory_length") for result in results]
    known = [length for length in memory if length is not None]
    text += f", at most {max(known)} bytes of its memory" if known else ""
    warned = sum(bool(result.figures["warnings"]) for result in results)
    return text + (f"; {warned} with warnings" if warned else "")


def numbered_warnings(results: list[dict[str, Any]]) -> dict[str, str]:
    """Lists each warning once and puts its number into a pipeline's figures: thousands may have the same text."""
    numbers: dict[str, str] = {}
    for result in results:
        for figures in (result["figures"], *result["figures"].get("pipelines", ())):
            if figures.get("warnings"):
                figures["warnings"] = numbers.setdefault(figures["warnings"], str(len(numbers) + 1))
    return {number: text for text, number in numbers.items()}


def leaves(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested figures, each with the names that lead to it."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", value


def short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def closest(results: list[Result]) -> str:
    """Returns error and bound of the tensor, of all cases, whose error comes closest to its bound."""
    all_of_them = [
        (result, tensor, figures) for result in results for tensor, figures in result.figures.get("tensors", {}).items()
    ]
    result, tensor, figures = max(all_of_them, key=lambda each: share(each[2]))
    where = " ".join((result.group, result.case, tensor, figures["of"])).strip()
    return f"error {figures['error']:.2e}, bound {figures['bound']:.2e} ({where})"


def share(figures: dict[str, Any]) -> float:
    """Returns the error of a tensor as a share of its bound."""
    return Part("", "", figures["error"], figures["bound"]).share


def grouped_messages(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Groups equal messages, each with its cases. Messages that differ only in the case's name count as equal."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        plain = result.message.replace(result.case, "...") if result.case else result.message
        key = (result.section, result.group, plain) if result.status == FAIL else ("", "", plain)
        groups.setdefault(key, []).append(result)
    grouped = []
    for members in groups.values():
        first = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        grouped.append((f"{first.section} {first.group} {first.case}".rstrip() + more, first.message))
    return grouped


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def without_nan(value: Any) -> Any:
    """Turns nan and infinity into text, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    return [without_nan(each) for each in value] if isinstance(value, list | tuple) else value
