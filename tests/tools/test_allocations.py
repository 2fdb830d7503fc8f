"""Tests that a decoding step on `mps` allocates no host memory of its own. Only PyTorch does, for calls and outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.skipif(sys.platform != "linux", reason="allocations are counted by a library that Linux preloads")
def test_ops_of_decoding_allocate_nothing(tmp_path: Path) -> None:
    library = tmp_path / "count_allocations.so"
    source = ROOT / "tests/helpers/count_allocations.c"
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", library, source], check=True)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.allocations"],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    counts = json.loads(finished.stdout)
    assert counts and all(others > 0 for _, others in counts.values()), counts  # the counter sees PyTorch's
    assert {name: own for name, (own, _) in counts.items() if own} == {}
