"""The examples of docs/simulator.md, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from simulator.device import Settings
from simulator.project import KEYS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulator.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    (source,), (expected,) = blocks("cpp"), blocks("text")
    (tmp_path / "twice.mm").write_text(source)
    (tmp_path / "example.py").write_text("".join(blocks("python")))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "example.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected


def test_the_settings_and_keys_are_all_there() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert rows == {*Settings._names, "run_at"} - {"detailed"}  # profile(detailed=True) sets that one
    (table,) = blocks("toml")
    assert re.findall(r"^(\w+) =", table, re.MULTILINE) == list(KEYS)
    (usage,) = re.findall(r"^USAGE = (.*)$", (ROOT / "simulator" / "__main__.py").read_text(), re.MULTILINE)
    assert all(option in PAGE for option in re.findall(r"--[\w-]+", usage))
