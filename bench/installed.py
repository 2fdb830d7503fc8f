"""Finds a library that bench takes from another package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def library_folder(package: str, variable: str, inside: str = "") -> Path | None:
    """Returns the folder that `variable` names, else the folder `inside` an installed package, else None."""
    if named := os.environ.get(variable):
        return Path(named).expanduser()
    result = importlib.util.find_spec(package)
    return None if result is None or result.origin is None else Path(result.origin).parent / inside
