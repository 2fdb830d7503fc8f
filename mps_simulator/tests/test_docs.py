"""Runs the README's examples unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mps_simulator.__main__ import USAGE
from mps_simulator.device import Settings
from mps_simulator.project import KEYS

PAGE = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    (source,), (expected,) = blocks("cpp"), blocks("text")
    (tmp_path / "twice.mm").write_text(source)
    (tmp_path / "example.py").write_text("".join(blocks("python")))
    command = [sys.executable, "example.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected


def test_the_settings_and_keys_are_all_there() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert rows == set(Settings._every) - {"detailed"}  # profile(detailed=True) sets it
    (table,) = blocks("toml")
    assert re.findall(r"^(\w+) =", table, re.MULTILINE) == list(KEYS)
    assert all(option in PAGE for option in re.findall(r"--[\w-]+", USAGE))
