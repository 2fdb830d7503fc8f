"""The table of checks in a page of the documentation, between two marks: a row for each check, as a run found it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from evidence.proof.checks import Check, Result

BEGIN = "<!-- python -m evidence.proof --page docs/verification.md writes this table -->"
END = "<!-- end of the table -->"
HEAD = "| check | cases | result |\n|---|---|---|\n"
NOT_RUN = ("-", "not run")


def label(check: Check) -> str:
    return f"`{check.name}`: {check.title}"


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Returns cases and result of each label in the page."""
    found = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|$", _between(text)[1], re.MULTILINE)
    return {name: (cases, result) for name, cases, result in found}


def updated(text: str, known: Iterable[Check], results: Sequence[Result]) -> str:
    """Returns the page with the rows of what was run. Other checks keep what an earlier run found."""
    kept = {label.split("`")[1]: row for label, row in rows(text).items()}
    new = {result.check.name: (result.finding.cases_in_words, result.word) for result in results if result.finding}
    lines = []
    for check in known:
        cases, word = new.get(check.name) or kept.get(check.name, NOT_RUN)
        lines.append(f"| {label(check)} | {cases} | {word} |\n")
    before, _, after = _between(text)
    return f"{before}{BEGIN}\n\n{HEAD}{''.join(lines)}\n{END}{after}"


def _between(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a page with the lines {BEGIN!r} and {END!r}")
    return before, table, after
