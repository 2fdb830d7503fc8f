"""Tests that `make lint` finds the phrases of .codespell/phrases.txt in pages and in code, but accepts plain text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHRASES = [line.split("->")[0] for line in (ROOT / ".codespell/phrases.txt").read_text().splitlines()]


def found_in(page: Path, text: str) -> set[str]:
    page.write_text(text)
    command = [sys.executable, "-m", "codespell_lib", "--config", ".codespell/phrases.cfg", str(page)]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False).stdout
    return {line.split(": ")[1].split(" ==> ")[0].lower() for line in printed.splitlines()}


def test_each_phrase_is_found(tmp_path: Path) -> None:
    text = "".join(f"It ends. {each.capitalize()}: a.\nIt ends. {each.capitalize()} a.\n" for each in PHRASES)
    assert found_in(tmp_path / "bad.md", text) == set(PHRASES)


def test_comments_and_docstrings_are_read(tmp_path: Path) -> None:
    starts = ("of", "nothing of")
    for line in ("// {} a tensor.", "# {} a tensor.", '"""{} a tensor."""'):
        text = "".join(line.format(start.capitalize()) + "\n" for start in starts)
        assert found_in(tmp_path / "bad.txt", text) == set(starts)
    assert found_in(tmp_path / "good.py", "x = y is None  # or there is none\n") == set()


def test_plain_sentences_pass(tmp_path: Path) -> None:
    text = "It is not measured. Most of them are slow, because of a copy. Besides, none of it comprises a state.\n"
    assert found_in(tmp_path / "good.md", text) == set()
