"""Runs a page's program in a separate process, forked from one that has imported PyTorch and transformers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "transformers.models.qwen3_5.modeling_qwen3_5"]
)  # the page itself imports torch_gdn


def run(code: str, page: Path, folder: Path, small_downloads: bool) -> str:
    """Returns what the program wrote to stderr if it failed, else "". What it printed is in the folder's stdout.txt."""
    errors = folder / "stderr.txt"
    process = FORKS.Process(target=_run, args=(code, page, folder, errors, small_downloads))
    process.start()
    process.join()
    return errors.read_text() + f"exit status {process.exitcode}" if process.exitcode else ""


def _run(code: str, page: Path, folder: Path, errors: Path, small_downloads: bool) -> None:
    sys.stdout, sys.stderr = (folder / "stdout.txt").open("w"), errors.open("w")
    os.chdir(folder)
    if small_downloads:
        import tests.helpers.downloads  # noqa: F401
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
