"""Finds and writes files that several processes share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

TUNING_VARIABLE = "TORCH_GDN_TUNING_CACHE"  # names the tuning cache's file


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
