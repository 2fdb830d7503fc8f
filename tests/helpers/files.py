"""Files that a test changes."""

from __future__ import annotations

from pathlib import Path


def replace_once(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has changed: plant the fault anew"
    file.write_text(text.replace(old, new))
