"""Reads and writes the file of what was measured on this machine, a part for each kind of measurement.

The file is $TORCH_GDN_TUNING_CACHE, else ~/.config/torch_gdn/tuning_cache.json. If the variable is empty, there is no
file. `torch_gdn.tools.tuning_cache` has the part "devices", and transformers' drafts have "drafts".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_gdn import _C, _files

VARIABLE, path = _files.TUNING_VARIABLE, _files.tuning_file
VERSION = 4  # the file's version
WITHOUT_RULES = 3  # an older version, whose rows of algorithms have no rule: only the delta rule was measured


def key() -> str:
    """Returns this machine's name in the file."""
    facts = _C.device_facts()
    return _C.tuning_key(facts["name"], facts["core_count"])


def read_parts(file: Path) -> dict[str, Any]:
    """Reads a file that `write_parts` wrote.

    Raises:
        ValueError: If it did not write it. The text has the file's name and what is wrong.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected a table of prefill algorithms: {error}") from error
    parts = content if isinstance(content, dict) else {}
    if (version := parts.get("version")) not in (WITHOUT_RULES, VERSION):
        raise ValueError(
            f"{file}: version: expected {VERSION}, got {version!r}; python -m torch_gdn tune writes a new one"
        )
    return parts


def write_parts(file: Path, parts: dict[str, Any]) -> None:
    """Writes these parts, and leaves the file's others as they are."""
    try:
        before = read_parts(file) if file.is_file() else {}
    except ValueError:
        before = {}  # whoever adds to a part has read it before
    content = {"version": VERSION, "devices": {}} | before | parts | {"version": VERSION}
    _files.write_whole(file, json.dumps(content, indent=1) + "\n")
