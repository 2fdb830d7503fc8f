"""`python -m evidence.proof [--only NAME ...] [--json FILE] [--page FILE] [--write]` runs checks and prints a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from evidence.proof import checks, page

UNPROVEN = """\
Only a Mac can show that Apple's own shader compiler accepts the kernels, how many registers it gives them, that an
Apple GPU computes the same values as the simulated device, and how fast the kernels are."""


def table(results: Sequence[checks.Result]) -> str:
    rows = [("check", "what it shows", "cases", "result", "s")]
    for result in results:
        cases = result.finding.cases_in_words if result.finding else "-"
        rows.append((result.check.name, result.check.title, cases, result.word, f"{result.seconds:.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def details(results: Sequence[checks.Result]) -> str:
    """Prints below the table what was wrong, what could not run, and the checks' notes."""
    lines = []
    for result in results:
        if result.not_run:
            lines.append(f"{result.check.name} was {result.word}: {result.not_run}")
        for problem in result.finding.problems if result.finding else ():
            lines.append(f"{result.check.name}: WRONG: {problem}")
        for note in result.finding.notes if result.finding else ():
            lines.append(f"{result.check.name}: {note}")
    return "\n".join(lines)


def report(results: Sequence[checks.Result]) -> dict[str, object]:
    return {
        "checks": [
            {
                "name": result.check.name,
                "title": result.check.title,
                "result": result.word,
                "seconds": round(result.seconds, 1),
                "cases": result.finding.cases if result.finding else None,
                "kinds": result.finding.kinds if result.finding else {},
                "problems": result.finding.problems if result.finding else [],
                "notes": result.finding.notes if result.finding else [],
                "not_run": result.not_run,
            }
            for result in results
        ],
        "unproven": UNPROVEN,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    known = checks.all_checks()
    parser = argparse.ArgumentParser(prog="python -m evidence.proof", description=__doc__)
    names = [each.name for each in known]
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=names, help=f"run only this check: {', '.join(names)}"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results as JSON")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the table into a page of the documentation")
    parser.add_argument("--write", action="store_true", help="write the tables that the checks generate")
    options = parser.parse_args(arguments)

    bar = checks.Bar()
    results = checks.run([each for each in known if not options.only or each.name in options.only], bar, options.write)
    bar.close()
    print(table(results))
    print(f"\n{details(results)}\n\n{UNPROVEN}")
    if options.json:
        options.json.write_text(json.dumps(report(results), indent=2) + "\n")
    if options.page:
        options.page.write_text(page.updated(options.page.read_text(), known, results))
    if any(result.finding and result.finding.problems for result in results):
        return 1
    # 2 means that nothing was wrong, but not everything ran.
    return 2 if any(result.not_run and not result.skipped for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
