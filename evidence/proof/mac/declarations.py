"""Reads what C, C++ and Objective-C headers declare of Apple's API, in one notation, so that descriptions compare.

`id<MTLBuffer>` in Objective-C and `MTL::Buffer*` in metal-cpp are both `MTLBuffer*`. `NSUInteger` and `NS::UInteger`
are both `unsigned long`. A declaration is a key, such as ("method", "MTLBuffer", "-contents"), and a value, `void*()`.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clang.cindex import Cursor, CursorKind, Diagnostic, Index, TranslationUnit, Type, TypeKind

TARGET = "arm64-apple-macos14.0"
PARSE_INCLUDE = Path(__file__).parent / "parse_include"
INCLUDE = Path(__file__).parent / "include"

Key = tuple[str, ...]


@dataclass(frozen=True)
class Declaration:
    key: Key
    value: str
    where: str  # file:line, where the file has no folder

    def __str__(self) -> str:
        return f"{' '.join(self.key)}: {self.value}".rstrip()


class HeaderError(RuntimeError):
    """Raised with the compiler's output if headers do not parse."""


@functools.cache
def apple_include_directories() -> tuple[str, ...]:
    """Returns clang's own headers and Apple's C and Objective-C runtime headers, as the ziglang package ships them."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0", "-x", "c++", "-###", "-c"]
    with tempfile.TemporaryDirectory() as directory:  # zig leaves an empty object file in its working directory
        finished = subprocess.run([*command, os.devnull], cwd=directory, capture_output=True, text=True, check=True)
    words = shlex.split(finished.stderr)
    pairs = itertools.pairwise(words)
    return tuple(path for flag, path in pairs if flag.endswith("isystem") and "libcxx" not in path)


def parse(source: str, flags: Sequence[str], language: str = "objective-c++") -> TranslationUnit:
    """Parses `source` for arm64 macOS with Apple's runtime headers. Any error raises HeaderError."""
    arguments = ["-x", language, "-std=c++17", "-target", TARGET, "-fblocks", "-nostdinc", "-nostdinc++", *flags]
    for directory in (str(PARSE_INCLUDE), *apple_include_directories()):
        arguments += ["-isystem", directory]
    unit = Index.create().parse("source.mm", args=arguments, unsaved_files=[("source.mm", source)])
    errors = [str(diagnostic) for diagnostic in unit.diagnostics if diagnostic.severity >= Diagnostic.Error]
    if errors:
        raise HeaderError("\n".join(errors))
    return unit


def where(cursor: Cursor) -> str:
    return f"{Path(cursor.location.file.name).name}:{cursor.location.line}"


def kind_of(thing: Cursor | Type) -> CursorKind | TypeKind | None:
    """Returns None if libclang's Python half has no name for it, as for some attributes and Objective-C's objects."""
    try:
        return thing.kind
    except ValueError:
        return None


def _framework_name(spelling: str) -> str | None:
    """`MTL::Buffer` -> `MTLBuffer`, `NS::Object` -> `id`. Returns None outside metal-cpp's namespaces."""
    match = re.fullmatch(r"(?:const )?(?:class |struct |enum )?(MTL|NS|CA)::(\w+)", spelling)
    if match is None:
        return None
    return "id" if match.groups() == ("NS", "Object") else "".join(match.groups())


def _objective_c_object(spelling: str) -> str:
    """`id<MTLBuffer>` -> `MTLBuffer*`, `NSArray<NSString *>` -> `NSArray*`, `id` -> `id`."""
    match = re.fullmatch(r"(?:const )?id(?:<(\w+)>)?", spelling)
    if match:
        return f"{match.group(1)}*" if match.group(1) else "id"
    return re.sub(r"<.*>", "", spelling.removeprefix("const ")).strip() + "*"


def _pointer(pointee: Type) -> str:
    if kind_of(pointee) in (TypeKind.FUNCTIONPROTO, TypeKind.FUNCTIONNOPROTO):
        return f"{_function(pointee)}*"
    record = _framework_name(pointee.spelling)
    if record is not None and kind_of(pointee) == TypeKind.RECORD:
        return "id" if record == "id" else f"{record}*"
    if pointee.spelling in ("objc_object", "struct objc_object"):
        return "id"
    # In an array of objects, const pointers are the same API: both spellings occur.
    inner = notation(pointee)
    is_object = inner == "id" or (inner.endswith("*") and not inner.startswith("const "))
    return ("" if is_object or not pointee.is_const_qualified() else "const ") + inner + "*"


def _function(function: Type) -> str:
    return f"{notation(function.get_result())}({', '.join(notation(each) for each in function.argument_types())})"


def notation(kind: Type, owner: str = "") -> str:
    """Returns a type in the common notation. `owner` is the class that `instancetype` means."""
    if kind.spelling.split(" ")[0] == "instancetype":
        return f"{owner}*"
    kind = kind.get_canonical()
    match kind_of(kind):
        case TypeKind.POINTER:
            return _pointer(kind.get_pointee())
        case TypeKind.INCOMPLETEARRAY:
            return _pointer(kind.element_type)
        case TypeKind.BLOCKPOINTER:
            return f"block {_function(kind.get_pointee())}"
        case TypeKind.OBJCOBJECTPOINTER:
            return _objective_c_object(kind.get_pointee().spelling)
        case TypeKind.OBJCID:
            return "id"
    spelling = kind.spelling.removeprefix("const ").removeprefix("volatile ")
    spelling = spelling.removeprefix("struct ").removeprefix("enum ")
    return _framework_name(spelling) or re.sub(r"^_NS", "NS", spelling)  # NSRange is a struct _NSRange


def signature(result: str, arguments: Sequence[str]) -> str:
    return f"{result}({', '.join(arguments)})"


def function_value(cursor: Cursor) -> str:
    return signature(notation(cursor.result_type), [notation(each.type) for each in cursor.get_arguments()])


def struct_value(cursor: Cursor) -> str:
    """Returns the fields with their types and byte offsets, and the size."""
    fields = [
        f"{notation(field.type)} {field.spelling} @{cursor.type.get_offset(field.spelling) // 8}"
        for field in cursor.type.get_fields()
    ]
    return f"{{{'; '.join(fields)}}} {cursor.type.get_size()} bytes"


def enumerators(cursor: Cursor, prefix: str = "") -> Iterator[Declaration]:
    underlying = notation(cursor.enum_type)
    for constant in cursor.get_children():
        if kind_of(constant) == CursorKind.ENUM_CONSTANT_DECL:
            value = f"{underlying} {constant.enum_value}"
            yield Declaration(("enumerator", prefix + constant.spelling), value, where(constant))


def _class_declarations(cursor: Cursor) -> Iterator[Declaration]:
    """Yields the members. clang declares getters and setters of properties as methods."""
    owner = cursor.spelling
    is_category = kind_of(cursor) == CursorKind.OBJC_CATEGORY_DECL
    if is_category:
        owner = next(child.spelling for child in cursor.get_children() if kind_of(child) == CursorKind.OBJC_CLASS_REF)
    else:
        kind = "protocol" if kind_of(cursor) == CursorKind.OBJC_PROTOCOL_DECL else "class"
        yield Declaration(("kind", owner), kind, where(cursor))
    for child in cursor.get_children():
        if kind_of(child) in (CursorKind.OBJC_SUPER_CLASS_REF, CursorKind.OBJC_PROTOCOL_REF):
            yield Declaration(("parent", owner, child.spelling), "", where(cursor))
        elif kind_of(child) in (CursorKind.OBJC_INSTANCE_METHOD_DECL, CursorKind.OBJC_CLASS_METHOD_DECL):
            sign = "-" if kind_of(child) == CursorKind.OBJC_INSTANCE_METHOD_DECL else "+"
            arguments = [notation(argument.type, owner) for argument in child.get_arguments()]
            value = signature(notation(child.result_type, owner), arguments)
            yield Declaration(("method", owner, sign + child.spelling), value, where(child))


_CLASSES = (CursorKind.OBJC_INTERFACE_DECL, CursorKind.OBJC_PROTOCOL_DECL, CursorKind.OBJC_CATEGORY_DECL)


def _declarations_of(cursor: Cursor) -> Iterator[Declaration]:
    if kind_of(cursor) in _CLASSES:
        yield from _class_declarations(cursor)
    elif kind_of(cursor) == CursorKind.ENUM_DECL:
        yield from enumerators(cursor)
    elif kind_of(cursor) in (CursorKind.LINKAGE_SPEC, CursorKind.UNEXPOSED_DECL):
        for child in cursor.get_children():
            yield from _declarations_of(child)
    elif kind_of(cursor) == CursorKind.FUNCTION_DECL:
        yield Declaration(("function", cursor.spelling), function_value(cursor), where(cursor))
    elif kind_of(cursor) == CursorKind.VAR_DECL:
        yield Declaration(("constant", cursor.spelling), notation(cursor.type), where(cursor))
    elif kind_of(cursor) == CursorKind.TYPEDEF_DECL:
        underlying = cursor.underlying_typedef_type.get_canonical()
        if kind_of(underlying) == TypeKind.RECORD and underlying.get_size() > 0:
            yield Declaration(("struct", cursor.spelling), struct_value(underlying.get_declaration()), where(cursor))
            return
        value = notation(cursor.underlying_typedef_type)
        if value != cursor.spelling:  # an enum's or a struct's own name says nothing
            yield Declaration(("type", cursor.spelling), value, where(cursor))


def objective_c(unit: TranslationUnit, directories: Sequence[Path]) -> list[Declaration]:
    """Returns what the headers below `directories` declare, in their order."""
    roots = tuple(f"{directory}{os.sep}" for directory in directories)
    result: list[Declaration] = []
    for cursor in unit.cursor.get_children():
        if cursor.location.file is not None and cursor.location.file.name.startswith(roots):
            result += _declarations_of(cursor)
    return result
