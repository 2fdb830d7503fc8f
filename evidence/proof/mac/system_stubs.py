"""Writes stub libraries (.tbd) of macOS for the linker. The ziglang package has only libSystem's.

A stub has just what Apple-built libraries in public macOS wheels (torch's, MLX's) import from the system library of
that name. Those wheels run on macOS 14, so whatever links against the stubs is there too. A symbol that none of them
uses stays open, and is reported, until its source is named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from evidence.proof.mac.macho import Image

SYSTEM = ("/usr/lib/", "/System/Library/Frameworks/")
CLASS = "_OBJC_CLASS_$_"
# Library -> symbols that are documented but that no library at hand uses. A comment names the document.
DOCUMENTED: Mapping[str, frozenset[str]] = {}

_TBD = """--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '{name}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {symbols} ]
    objc-classes: [ {classes} ]
...
"""


def system_symbols(images: Iterable[Image]) -> dict[str, frozenset[str]]:
    """Returns, by the install name of each system library, the symbols that some image imports from it."""
    result: dict[str, set[str]] = {}
    for image in images:
        for symbol in image.imports:
            if symbol.library.startswith(SYSTEM):
                result.setdefault(symbol.library, set()).add(symbol.name)
    return {name: frozenset(symbols) | DOCUMENTED.get(name, frozenset()) for name, symbols in result.items()}


def _file(directory: Path, install_name: str) -> Path:
    name = Path(install_name).name
    if ".framework/" in install_name:
        return directory / f"{name}.framework" / f"{name}.tbd"
    return directory / f"{Path(name).stem}.tbd"


def write(directory: Path, symbols: Mapping[str, frozenset[str]]) -> dict[str, Path]:
    """Writes a stub for each library. `-F directory -framework NAME` finds the frameworks."""
    files = {}
    for install_name, names in symbols.items():
        path = _file(directory, install_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        classes = sorted(name.removeprefix(CLASS) for name in names if name.startswith(CLASS))
        others = sorted(name for name in names if not name.startswith("_OBJC_"))
        path.write_text(
            _TBD.format(
                name=install_name, symbols=", ".join(f"'{name}'" for name in others), classes=", ".join(classes)
            )
        )
        files[install_name] = path
    return files
