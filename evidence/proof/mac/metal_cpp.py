"""Reads Apple's Metal and Foundation from metal-cpp, whose headers come with the public mlx-metal wheel.

Each inline method sends one message, whose selector, argument types and result type are the API's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clang.cindex import Cursor, CursorKind, TranslationUnit, TypeKind

from evidence.proof.mac.declarations import (
    Declaration,
    enumerators,
    function_value,
    kind_of,
    notation,
    parse,
    signature,
    struct_value,
    where,
)

NAMESPACES = ("MTL", "NS")
SOURCE = "#include <Foundation/Foundation.hpp>\n#include <Metal/Metal.hpp>\n"
# With these, selectors and class names are strings in the headers, and not names of external variables.
FLAGS = ("-DNS_PRIVATE_IMPLEMENTATION", "-DMTL_PRIVATE_IMPLEMENTATION", "-DINFINITY=__builtin_inff()")


def _descendants(cursor: Cursor, kind: CursorKind) -> Iterator[Cursor]:
    return (each for each in cursor.walk_preorder() if kind_of(each) == kind)


def _variables(namespace: Cursor) -> Iterator[Cursor]:
    for child in namespace.get_children():
        if kind_of(child) == CursorKind.NAMESPACE:
            yield from _variables(child)
        elif kind_of(child) == CursorKind.VAR_DECL:
            yield child


def _looked_up(unit: TranslationUnit) -> Iterator[tuple[Cursor, str]]:
    """Returns the variables that hold selectors, classes and protocols, and the names that they look up."""
    for namespace in unit.cursor.get_children():
        if kind_of(namespace) == CursorKind.NAMESPACE and namespace.spelling in NAMESPACES:
            for variable in _variables(namespace):
                if variable.spelling.startswith("s_k"):
                    literal = next(_descendants(variable, CursorKind.STRING_LITERAL))
                    yield variable, literal.spelling.strip('"')


def _name(cursor: Cursor) -> str:
    """`MTL::Buffer` -> `MTLBuffer`."""
    return cursor.semantic_parent.spelling + cursor.spelling


def _message(method: Cursor, strings: dict[str, str]) -> Declaration | None:
    """Returns the message that a method sends, if it sends just one whose types are known."""
    calls = [
        call
        for call in _descendants(method, CursorKind.CALL_EXPR)
        if call.spelling in ("sendMessage", "sendMessageSafe") and call.referenced is not None
    ]
    if len(calls) != 1:
        return None
    named = [strings[ref.referenced.get_usr()] for ref in _descendants(calls[0], CursorKind.DECL_REF_EXPR)
             if ref.spelling.startswith("s_k")]  # fmt: skip
    owner = _name(method.semantic_parent)
    sent = calls[0].referenced.type.get_canonical()
    value = signature(notation(sent.get_result()), [notation(each) for each in list(sent.argument_types())[2:]])
    sign = "+" if len(named) == 2 else "-"  # the class that receives it comes first
    return Declaration(("method", owner, sign + named[-1]), value, where(method))


def _parents(cursor: Cursor) -> Iterator[Declaration]:
    """`class Buffer : public NS::Referencing<Buffer, Resource>` is a Resource, `NS::Copying<...>` can be copied."""
    for base in cursor.get_children():
        if kind_of(base) != CursorKind.CXX_BASE_SPECIFIER:
            continue
        template = base.type.get_canonical()
        if template.spelling.startswith(("NS::Copying<", "NS::SecureCoding<")):
            yield Declaration(("parent", _name(cursor), "NSCopying"), "", where(cursor))
        bases = [template.get_template_argument_type(1)] if template.get_num_template_arguments() > 1 else [template]
        for each in bases:
            if kind_of(each) == TypeKind.RECORD and not each.spelling.startswith("NS::Object"):
                yield Declaration(("parent", _name(cursor), notation(each)), "", where(cursor))


def _maker(struct: Cursor, namespace: str) -> Iterator[Declaration]:
    """Reads `MTL::Size::Make` as MTLSizeMake, and `NS::Range::Make` as NSMakeRange."""
    for child in struct.get_children():
        if child.spelling == "Make":
            name = f"NSMake{struct.spelling}" if namespace == "NS" else f"{namespace}{struct.spelling}Make"
            yield Declaration(("function", name), function_value(child), where(child))


def _in_namespace(cursor: Cursor, namespace: str) -> Iterator[Declaration]:
    name = namespace + cursor.spelling
    if kind_of(cursor) == CursorKind.ENUM_DECL:
        yield from enumerators(cursor, namespace)
    elif kind_of(cursor) == CursorKind.TYPE_ALIAS_DECL:
        yield Declaration(("type", name), notation(cursor.underlying_typedef_type), where(cursor))
    elif kind_of(cursor) == CursorKind.STRUCT_DECL and cursor.is_definition():
        yield Declaration(("struct", name), struct_value(cursor), where(cursor))
        yield from _maker(cursor, namespace)
    elif kind_of(cursor) == CursorKind.CLASS_DECL and cursor.is_definition():
        yield from _parents(cursor)
    elif kind_of(cursor) == CursorKind.LINKAGE_SPEC:
        for child in cursor.get_children():
            yield from _in_namespace(child, namespace)
    elif kind_of(cursor) == CursorKind.VAR_DECL:
        yield Declaration(("constant", name), notation(cursor.type), where(cursor))


def _at_top(cursor: Cursor, strings: dict[str, str]) -> Iterator[Declaration]:
    if kind_of(cursor) == CursorKind.NAMESPACE and cursor.spelling in NAMESPACES:
        for child in cursor.get_children():
            yield from _in_namespace(child, cursor.spelling)
    elif kind_of(cursor) == CursorKind.CXX_METHOD and kind_of(cursor.semantic_parent) == CursorKind.CLASS_DECL:
        message = _message(cursor, strings)
        if message is not None:
            yield message
    elif kind_of(cursor) == CursorKind.LINKAGE_SPEC:
        for child in cursor.get_children():
            if kind_of(child) == CursorKind.FUNCTION_DECL:
                yield Declaration(("function", child.spelling), function_value(child), where(child))


def read(include: Path) -> list[Declaration]:
    """Reads everything in metal-cpp, from the folder that holds Metal/ and Foundation/."""
    unit = parse(SOURCE, (*FLAGS, f"-I{include}"), language="c++")
    names = list(_looked_up(unit))
    strings = {variable.get_usr(): name for variable, name in names}
    result = [
        Declaration(("kind", name), variable.semantic_parent.spelling.lower(), where(variable))
        for variable, name in names
        if variable.semantic_parent.spelling in ("Class", "Protocol")
    ]
    for cursor in unit.cursor.get_children():
        if cursor.location.file is not None and cursor.location.file.name.startswith(str(include)):
            result += _at_top(cursor, strings)
    return result
