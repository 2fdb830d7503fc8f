"""Keeps compiled objects by what they were compiled from. A copied or moved checkout then compiles nothing again.

An object's key is the compiler, its flags and the source. A list next to each object has the headers that it
read, with their hashes. Paths in both are relative to the folders that differ between checkouts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

KEPT = 4  # objects for each key, which differ in their headers


@cache
def _hash_of(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_of(path: Path) -> str:
    facts = path.stat()
    return _hash_of(path, facts.st_mtime_ns, facts.st_size)


class Objects:
    """Objects below `folder`. `roots` has the folders whose paths do not count, by name."""

    def __init__(self, folder: Path, roots: Mapping[str, Path]) -> None:
        self._folder = folder
        # A folder before those around it, so that each path gets the nearest one.
        self._roots = sorted(((str(path), name) for name, path in roots.items()), key=lambda root: -len(root[0]))

    def named(self, text: str) -> str:
        """Returns the text with names in place of the folders."""
        for path, name in self._roots:
            text = text.replace(path, f"{{{name}}}")
        return text

    def _path(self, text: str) -> Path:
        for path, name in self._roots:
            text = text.replace(f"{{{name}}}", path)
        return Path(text)

    def _place(self, source: Path, command: Sequence[str]) -> Path:
        words = [*command, source.read_text()]
        return self._folder / hashlib.sha256("\0".join(map(self.named, words)).encode()).hexdigest()

    def restore(self, source: Path, command: Sequence[str], target: Path) -> bool:
        """Writes the object of an earlier compilation, and the make rule with its headers. Returns False if there is
        none.

        Args:
            command: The compiler and the flags that the object depends on, without the names of files.
        """
        for record in self._place(source, command).glob("*.json"):
            headers = {self._path(name): wanted for name, wanted in json.loads(record.read_text()).items()}
            if all(path.is_file() and hash_of(path) == wanted for path, wanted in headers.items()):
                shutil.copyfile(record.with_suffix(".o"), target)
                target.with_suffix(".d").write_text(rule_of(target, [source, *headers]))
                return True
        return False

    def keep(self, source: Path, command: Sequence[str], target: Path, headers: Iterable[Path]) -> None:
        """Keeps an object that was just compiled."""
        place = self._place(source, command)
        place.mkdir(parents=True, exist_ok=True)
        hashes = {self.named(os.path.normpath(path)): hash_of(path) for path in headers if path != source}
        text = json.dumps(hashes, sort_keys=True, indent=1)
        record = place / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        # Another process may do the same: each file appears whole, and the record after its object.
        unfinished = place / f"{target.name}.{os.getpid()}"
        shutil.copyfile(target, unfinished)
        unfinished.replace(record.with_suffix(".o"))
        unfinished.write_text(text)
        unfinished.replace(record)
        for old in sorted(place.glob("*.json"), key=lambda path: -path.stat().st_mtime_ns)[KEPT:]:
            old.unlink(missing_ok=True)
            old.with_suffix(".o").unlink(missing_ok=True)


def rule_of(target: Path, inputs: Iterable[Path]) -> str:
    return f"{target}: " + " \\\n ".join(map(str, inputs)) + "\n"
