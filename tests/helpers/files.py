"""Copies files that a test changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_gdn import _C


@contextmanager
def copied_shaders(folder: Path) -> Iterator[Path]:
    """Copies the shaders. Kernels are compiled from the copy inside the block, which starts without pipelines."""
    before = _C.shader_directory()
    copy = Path(shutil.copytree(before, folder / "shaders"))
    _C.clear_pipelines()
    _C.set_shader_directory(str(copy))
    try:
        yield copy
    finally:
        _C.set_shader_directory(before)
        _C.clear_pipelines()


def replace_once(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has changed: plant the fault anew"
    file.write_text(text.replace(old, new))
