"""Reads Mach-O files for arm64, with LIEF."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import lief

FLAT = "flat lookup"  # any image of the process may supply it
ITSELF = "itself"
WEAK_LOOKUP = -3  # BIND_SPECIAL_DYLIB_WEAK_LOOKUP of mach-o/loader.h

# LIEF prints a complaint about the empty export information that a module may have.
lief.logging.disable()


@dataclass(frozen=True)
class Import:
    name: str
    library: str  # an install name, FLAT, ITSELF


@dataclass(frozen=True)
class Image:
    """A library, an extension module or an object file."""

    file_type: str
    flags: frozenset[str]
    commands: tuple[str, ...]
    install_name: str | None
    libraries: tuple[str, ...]
    rpaths: tuple[str, ...]
    platform: str
    minimum_os: tuple[int, ...]
    imports: tuple[Import, ...]
    undefined: tuple[str, ...]  # all symbols that are not defined here; an object file's `imports`
    exports: frozenset[str]
    selectors: tuple[str, ...]


def _word(value: object) -> str:
    return str(value).rsplit(".", 1)[-1]


def _supplier(symbol: lief.MachO.Symbol, libraries: tuple[str, ...]) -> str:
    binding = symbol.binding_info
    assert binding is not None, symbol.name  # callers have checked it
    ordinal = binding.library_ordinal
    if ordinal in (0, WEAK_LOOKUP):  # a weak C++ symbol; the symbol table has the library linked against
        ordinal = (symbol.description >> 8) & 0xFF
    if 0 < ordinal <= len(libraries):
        return libraries[ordinal - 1]
    return ITSELF if ordinal == 0 else FLAT


def _selectors(binary: lief.MachO.Binary) -> tuple[str, ...]:
    section = binary.get_section("__TEXT", "__objc_methname")
    if section is None:
        return ()
    return tuple(name.decode() for name in bytes(section.content).split(b"\0") if name)


def read(path: Path) -> Image:
    """Reads a file, but only once while it does not change."""
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_ino)


@functools.cache
def _read(path: Path, modified: int, inode: int) -> Image:
    fat = lief.MachO.parse(str(path))
    binary = fat.at(0) if fat is not None else None  # `fat` owns it, and must outlive it
    if binary is None:
        raise ValueError(f"{path} is not a Mach-O file")
    libraries = tuple(library.name for library in binary.libraries if _word(library.command) != "ID_DYLIB")
    own_name = [library.name for library in binary.libraries if _word(library.command) == "ID_DYLIB"]
    version = binary.build_version if binary.has_build_version else None
    return Image(
        file_type=_word(binary.header.file_type),
        flags=frozenset(_word(flag) for flag in binary.header.flags_list),
        commands=tuple(_word(command.command) for command in binary.commands),
        install_name=own_name[0] if own_name else None,
        libraries=libraries,
        rpaths=tuple(rpath.path for rpath in binary.rpaths),
        platform=_word(version.platform) if version else "",
        minimum_os=tuple(version.minos) if version else (),
        imports=tuple(
            Import(str(symbol.name), _supplier(symbol, libraries))
            for symbol in binary.imported_symbols
            if symbol.has_binding_info  # otherwise dyld never looks for it
        ),
        undefined=tuple(str(symbol.name) for symbol in binary.imported_symbols),
        exports=frozenset(str(symbol.name) for symbol in binary.exported_symbols),
        selectors=_selectors(binary),
    )
