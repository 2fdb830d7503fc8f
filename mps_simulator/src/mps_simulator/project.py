"""Reads what to load on the simulated device from a project's pyproject.toml:

    [[tool.mps_simulator.load]]
    name = "my_ops_metal"
    sources = ["csrc/**/*.mm", "csrc/*.cpp"]
    exclude = ["csrc/cpu.cpp"]     # this key and the following ones are optional
    units = ["csrc/*.cpp"]         # which of them compile together, one unit per folder
    include = ["csrc"]             # folders of headers
    extensions = ["my_ops._C"]     # extension modules: imported first, and linked against
    flags = ["-DMY_FLAG=1"]        # more for the compiler

Paths and patterns are relative to the file: the nearest pyproject.toml with a [tool.mps_simulator] table, in the
working directory or above it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

KEYS = ("name", "sources", "exclude", "units", "include", "extensions", "flags")


@dataclass(frozen=True)
class Entry:
    """The arguments of mps_simulator.load(), and `extensions`, the names of extension modules."""

    name: str
    sources: list[Path]
    units: list[Path]
    include: list[Path]
    extensions: list[str]
    flags: list[str]


class ProjectError(ValueError):
    """Raised if the table does not have the form described above."""


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(f"{path}: {error}") from None


def _files(where: str, root: Path, patterns: list[str]) -> set[Path]:
    result: set[Path] = set()
    for pattern in patterns:
        matches = set(root.glob(pattern))
        if not matches:
            raise ProjectError(f"{where}: no file matches {pattern!r} in {root}")
        result |= matches
    return result


def _entry(path: Path, table: Any) -> Entry:
    where = f"{path}: tool.mps_simulator.load"
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ProjectError(f"{where}: expected tables with a name, got {table!r}")
    where = f"{where} {table['name']!r}"
    for key, value in table.items():
        if key not in KEYS:
            raise ProjectError(f"{where}: expected the keys {', '.join(KEYS)}, got {key!r}")
        if key != "name" and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise ProjectError(f"{where}: {key}: expected a list of strings, got {value!r}")
    root = path.parent
    sources = _files(where, root, table.get("sources", [])) - _files(where, root, table.get("exclude", []))
    if not sources:
        raise ProjectError(f"{where}: expected sources, got none")
    units = _files(where, root, table.get("units", [])) & sources
    include = [root / folder for folder in table.get("include", [])]
    extensions, flags = table.get("extensions", []), table.get("flags", [])
    return Entry(table["name"], sorted(sources), sorted(units), include, extensions, flags)


def find_project() -> Path | None:
    """Returns the pyproject.toml to read, or None."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and "mps_simulator" in _read_toml(path).get("tool", {}):
            return path
    return None


def read_project(path: Path) -> list[Entry]:
    tables = _read_toml(path)["tool"]["mps_simulator"].get("load", [])
    if not isinstance(tables, list):
        raise ProjectError(f"{path}: tool.mps_simulator.load: expected [[tool.mps_simulator.load]], got {tables!r}")
    return [_entry(path, table) for table in tables]


def extension_file(name: str) -> Path | None:
    """Finds the file of an extension module without importing its package. Returns None if it is not built."""
    package, *rest = name.split(".")
    spec = importlib.util.find_spec(package)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return Path(spec.origin) if spec and spec.origin else None
