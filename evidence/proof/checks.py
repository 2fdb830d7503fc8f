"""The registry of checks. A check is a function that returns how many cases it looked at and what was wrong.

A new section of checks is a module that decorates its functions with `check`, and its name in SECTIONS.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from evidence.proof.reasons import Blocked, Skipped, Unavailable

SECTIONS = (
    "evidence.proof.mac.checks",
    "evidence.proof.metal.checks",
    "evidence.lab.agx.checks",
    "evidence.lab.cuda.checks",
    "evidence.proof.mutate.checks",
)


class Progress(Protocol):
    """Receives the number of steps to come, then each finished one."""

    def expect(self, steps: int) -> None: ...

    def step(self, what: str) -> None: ...


class Silent:
    """Shows no progress bar."""

    def expect(self, steps: int) -> None:
        pass

    def step(self, what: str) -> None:
        pass


class Bar:
    """A progress bar that grows with what each check announces. `unit` names a step."""

    def __init__(self, unit: str = "step") -> None:
        self._bar = tqdm(total=0, unit=unit, bar_format="{n_fmt}/{total_fmt} {bar} {elapsed} {postfix}")

    def expect(self, steps: int) -> None:
        self._bar.total += steps
        self._bar.refresh()

    def step(self, what: str) -> None:
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


@dataclass
class Finding:
    """A check's result: `problems` has a line for each wrong case, `notes` what else a reader should know."""

    cases: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[Path, str] = field(default_factory=dict)  # generated files of the repository, with the right text
    kinds: dict[str, int] = field(default_factory=dict)  # the cases of each kind, if kinds show different things

    @property
    def cases_in_words(self) -> str:
        """Returns `348`, or `336 agreed, 8 by name only, 4 not covered` if the cases have several kinds."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.items()) or f"{self.cases}"

    def check_tables(self, command: str, write: bool) -> None:
        """Writes the tables, or adds a problem for each that differs from what the sources give."""
        for path, text in self.tables.items():
            if write:
                path.write_text(text)
            elif not path.exists() or path.read_text() != text:
                self.problems.append(f"{path.name} is not what the sources give: {command} --write writes it")


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    run: Callable[[Progress], Finding]


@dataclass(frozen=True)
class Result:
    check: Check
    finding: Finding | None
    not_run: str  # the reason why it did not run, or empty
    seconds: float
    skipped: bool = False  # it did not run, for a good reason

    @property
    def word(self) -> str:
        if self.finding is None:
            return "skipped" if self.skipped else "not run"
        return f"{len(self.finding.problems)} wrong" if self.finding.problems else "pass"


REGISTRY: dict[str, Check] = {}


def check(name: str, title: str) -> Callable[[Callable[[Progress], Finding]], Callable[[Progress], Finding]]:
    """Registers a function as a check. The table shows `title`."""

    def register(run: Callable[[Progress], Finding]) -> Callable[[Progress], Finding]:
        REGISTRY[name] = Check(name, title, run)
        return run

    return register


def all_checks() -> Sequence[Check]:
    for section in SECTIONS:
        importlib.import_module(section)
    place = {section: number for number, section in enumerate(SECTIONS)}  # in any order of imports
    return sorted(REGISTRY.values(), key=lambda each: place.get(each.run.__module__, len(place)))


def run(checks: Iterable[Check], progress: Progress, write: bool = False) -> list[Result]:
    results = []
    for each in checks:
        start = time.monotonic()
        finding, not_run, skipped = None, "", False
        try:
            finding = each.run(progress)
            finding.check_tables(f"python -m evidence.proof --only {each.name}", write)
        except (Unavailable, Blocked, Skipped) as reason:
            not_run, skipped = str(reason), isinstance(reason, Skipped)
        except Exception as error:  # a check that breaks is a wrong case, and the others still run
            finding = Finding(1, [f"{type(error).__name__}: {error}"])
        results.append(Result(each, finding, not_run, time.monotonic() - start, skipped))
    return results
