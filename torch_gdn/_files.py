"""Finds and writes files that several processes share, above all that of what was measured on this machine.

That file is $TORCH_GDN_TUNING_CACHE, else ~/.config/torch_gdn/tuning_cache.json. If the variable is empty, there is no
file. It has a part for each kind of measurement: `torch_gdn.tools.tuning_cache` has the part "devices", and
transformers' drafts have "drafts".
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch_gdn import _C

TUNING_VARIABLE = "TORCH_GDN_TUNING_CACHE"  # names the tuning cache's file
VERSION = 4  # that file's version
WITHOUT_RULES = 3  # an older version, whose rows of algorithms have no rule: only the delta rule was measured


def write_whole(file: Path, text: str) -> None:
    """Writes the file as a whole or not at all, since another process may be reading it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keeps other processes from a file that this one reads and then writes, unless there is no place for a lock."""
    with ExitStack() as stack:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        yield


def tuning_file() -> Path | None:
    """Returns the file, or None if the variable is empty, or if it is unset and the user has no home.

    Raises:
        ValueError: If the variable names the home of a user that does not exist.
    """
    named = os.environ.get(TUNING_VARIABLE)
    if named == "":
        return None
    try:
        return folder() / "tuning_cache.json" if named is None else Path(named).expanduser()
    except RuntimeError as error:  # from pathlib
        if named is None:
            return None
        raise ValueError(f"{TUNING_VARIABLE}: expected a path, got {named!r}: {error}") from None


def folder() -> Path:
    """Returns the folder for this machine's files, unless a variable names another place.

    Raises:
        RuntimeError: If the user has no home.
    """
    return Path.home() / ".config" / "torch_gdn"


def key() -> str:
    """Returns this machine's name in the tuning cache."""
    facts = _C.device_facts()
    return _C.tuning_key(facts["name"], facts["core_count"])


def read_parts(file: Path) -> dict[str, Any]:
    """Reads a tuning cache that `write_parts` wrote.

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
    write_whole(file, json.dumps(content, indent=1) + "\n")
