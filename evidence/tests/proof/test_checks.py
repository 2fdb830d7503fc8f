"""Tests the command: its table, its JSON, its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evidence.proof import __main__ as command
from evidence.proof import checks
from evidence.proof.reasons import Unavailable

pytestmark = pytest.mark.xdist_group("proof")


def passing(progress: checks.Progress) -> checks.Finding:
    progress.expect(2)
    progress.step("one")
    progress.step("two")
    return checks.Finding(7, notes=["seven were looked at"])


def failing(progress: checks.Progress) -> checks.Finding:
    return checks.Finding(3, ["the second is crooked"])


def impossible(progress: checks.Progress) -> checks.Finding:
    raise Unavailable("no network")


def broken(progress: checks.Progress) -> checks.Finding:
    raise KeyError("a bug of the check")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (passing, failing, impossible, broken)
    known = {run.__name__: checks.Check(run.__name__, f"title of {run.__name__}", run) for run in runs}
    monkeypatch.setattr(checks, "REGISTRY", known)
    monkeypatch.setattr(checks, "SECTIONS", ())


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["passing"], 0),
        (["passing", "failing"], 1),
        (["passing", "impossible"], 2),
        (["failing", "impossible"], 1),
        (["broken"], 1),
    ],
)
def test_exit_status(registry: None, names: list[str], status: int) -> None:
    assert command.main([word for name in names for word in ("--only", name)]) == status


def test_table_says_cases_and_result(registry: None, capsys: pytest.CaptureFixture[str]) -> None:
    command.main([])
    table, _, _ = capsys.readouterr().out.partition("\n\n")
    rows = {line.split()[0]: line.split() for line in table.splitlines()}
    assert rows["passing"][-3:-1] == ["7", "pass"]
    assert rows["failing"][-4:-1] == ["3", "1", "wrong"]
    assert rows["impossible"][-4:-1] == ["-", "not", "run"]


def test_table_says_how_many_cases_of_each_kind(
    registry: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = checks.Finding(5, kinds={"agreed": 4, "not covered": 1})
    several = checks.Check("several", "title", lambda progress: finding)
    monkeypatch.setattr(checks, "REGISTRY", {"several": several})
    command.main([])
    assert "4 agreed, 1 not covered  pass" in capsys.readouterr().out


def test_what_was_wrong_noted_and_not_run_is_below_the_table(
    registry: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([])
    out = capsys.readouterr().out
    assert "failing: WRONG: the second is crooked" in out
    assert "passing: seven were looked at" in out
    assert "impossible was not run: no network" in out
    assert "broken: WRONG: KeyError: 'a bug of the check'" in out
    assert command.UNPROVEN in out


def test_json_has_what_the_table_has(registry: None, tmp_path: Path) -> None:
    command.main(["--json", str(tmp_path / "proof.json")])
    report = json.loads((tmp_path / "proof.json").read_text())
    facts = {each["name"]: (each["cases"], each["result"], each["problems"]) for each in report["checks"]}
    assert facts == {
        "passing": (7, "pass", []),
        "failing": (3, "1 wrong", ["the second is crooked"]),
        "impossible": (None, "not run", []),
        "broken": (1, "1 wrong", ["KeyError: 'a bug of the check'"]),
    }
    assert report["unproven"] == command.UNPROVEN


def test_unknown_check_is_refused(registry: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "nonsense"])
    assert "nonsense" in capsys.readouterr().err
