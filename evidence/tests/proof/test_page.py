"""Tests that runs wrote the table of checks in docs/verification.md: it has a row for each check that exists, and no
other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.proof import __main__ as command
from evidence.proof import checks, page
from evidence.proof.checks import Check, Finding, Result

pytestmark = pytest.mark.xdist_group("proof")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "verification.md"


def nothing(progress: checks.Progress) -> Finding:
    return Finding(0)


FIRST, SECOND, THIRD = (Check(name, f"title of {name}", nothing) for name in ("first", "second", "third"))
BEFORE = f"""# Title

{page.BEGIN}

{page.HEAD}| `first`: an earlier title | 3 | pass |
| `second`: title of second | 4 | pass |
| `gone`: a check that there was | 5 | pass |

{page.END}

More.
"""


def test_the_page_has_each_check_and_no_other() -> None:
    assert list(page.rows(PAGE.read_text())) == [page.label(check) for check in checks.all_checks()]


def test_the_page_shows_a_run_of_each() -> None:
    assert [label for label, row in page.rows(PAGE.read_text()).items() if row == page.NOT_RUN] == []


def test_what_ran_is_written_and_what_did_not_is_kept() -> None:
    finding = Finding(9, ["one is wrong"], kinds={"agreed": 8, "by name only": 1})
    results = [Result(SECOND, finding, "", 1.0), Result(FIRST, None, "no network", 1.0)]
    text = page.updated(BEFORE, [FIRST, SECOND, THIRD], results)
    assert page.rows(text) == {
        "`first`: title of first": ("3", "pass"),
        "`second`: title of second": ("8 agreed, 1 by name only", "1 wrong"),
        "`third`: title of third": page.NOT_RUN,
    }
    assert text.startswith("# Title\n\n") and text.endswith("\n\nMore.\n")


def test_writing_again_changes_nothing() -> None:
    text = page.updated(BEFORE, [FIRST, SECOND, THIRD], [])
    assert page.updated(text, [FIRST, SECOND, THIRD], []) == text


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a page with the lines"):
        page.updated("# Title\n", [FIRST], [])


def test_the_command_writes_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "REGISTRY", {"first": Check("first", "title of first", lambda progress: Finding(7))})
    monkeypatch.setattr(checks, "SECTIONS", ())
    file = tmp_path / "page.md"
    file.write_text(BEFORE)
    assert command.main(["--page", str(file)]) == 0
    assert page.rows(file.read_text()) == {"`first`: title of first": ("7", "pass")}
