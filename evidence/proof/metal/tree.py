"""Reads clang's syntax tree of a translated program as the rules need it: functions, kernels, places, types."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from evidence.proof.metal.front_end import NAMESPACE, metal_terms
from evidence.proof.metal.values import NotUnderstood

Node = dict[str, Any]  # a node of clang's JSON: kind, type, inner, ...

GENERATED = "simulator_"  # begins names that the translation adds
FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl", "CXXDestructorDecl")
RECORDS = ("CXXRecordDecl", "ClassTemplateSpecializationDecl")  # a partial specialisation is a pattern


def children(node: Node) -> list[Node]:
    """Returns the parts without empty slots, such as the missing initialiser of a `for`."""
    return [child for child in node.get("inner", ()) if child]


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from walk(child)


def type_of(node: Node) -> str:
    """Returns the type with typedefs and aliases resolved, in clang's words."""
    kind = node.get("type", {})
    return str(kind.get("desugaredQualType") or kind.get("qualType", ""))


def referenced(node: Node) -> str:
    """Returns the id of what a name or member refers to."""
    return str(node.get("referencedDecl", {}).get("id") or node.get("referencedMemberDecl", ""))


def name_in(node: Node) -> str:
    """Returns the id of the variable that an expression is, apart from casts and parentheses, or an empty string."""
    while node["kind"] in ("ImplicitCastExpr", "ParenExpr"):
        node = children(node)[0]
    return referenced(node)


def callee(call: Node) -> Node:
    """Returns the name or member expression that a call calls."""
    node = children(call)[0]
    while node["kind"] not in ("DeclRefExpr", "MemberExpr") and children(node):
        node = children(node)[0]
    return node


def callee_name(call: Node) -> str:
    target = callee(call)
    return str(target.get("referencedDecl", {}).get("name") or target.get("name", ""))


def parameters_of(function: Node) -> list[Node]:
    return [child for child in children(function) if child["kind"] == "ParmVarDecl"]


def body_of(function: Node) -> Node | None:
    return next((child for child in children(function) if child["kind"] == "CompoundStmt"), None)


@dataclass
class Kernel:
    name: str  # the pipeline's name
    function: Node
    builtins: dict[str, str]  # id of a parameter -> its attribute, such as thread_index_in_simdgroup

    def buffers(self) -> list[Node]:
        """Returns the parameters that take a buffer. No kernel of ours takes dynamic threadgroup memory."""
        return [each for each in parameters_of(self.function) if each["id"] not in self.builtins]


class Places:
    """Finds where in the Metal source a node of the translated text comes from."""

    def __init__(self, translated: str) -> None:
        self._starts, self._lines = [0], [("translated", 1)]
        position, file, line = 0, "translated", 1
        for text in translated.splitlines(keepends=True):
            position += len(text.encode())
            line += 1
            if marker := re.match(r'# (\d+) "([^"]*)"', text):
                line, file = int(marker[1]), marker[2]
            self._starts.append(position)
            self._lines.append((file, line))

    def of(self, node: Node) -> str:
        location = node.get("range", {}).get("begin", {}) or node.get("loc", {})
        location = location.get("expansionLoc", location)
        if "offset" not in location:
            return "?"
        file, line = self._lines[bisect.bisect_right(self._starts, location["offset"]) - 1]
        return f"{file}:{line}"


@dataclass
class Tree:
    """`nodes` are the program's declarations, with templates and all their instances, but without generated ones."""

    places: Places
    nodes: list[Node]
    functions: dict[str, Node] = field(default_factory=dict)  # those with a body, without patterns of templates
    records: dict[str, Node] = field(default_factory=dict)  # by the name in types
    kernels: list[Kernel] = field(default_factory=list)
    _declared_before: dict[str, str] = field(default_factory=dict)  # id of a declaration -> id of the one before it

    def function(self, node: Node) -> Node | None:
        """Returns the function that a name or member refers to, if it is the program's."""
        return self.functions.get(self._first(referenced(node)))

    def _first(self, identifier: str) -> str:
        while identifier in self._declared_before:
            identifier = self._declared_before[identifier]
        return identifier

    def everything(self) -> Iterator[Node]:
        for node in self.nodes:
            yield from walk(node)

    def _collect(self, node: Node, path: str) -> None:
        inner = children(node)
        kind = node["kind"]
        if kind in ("FunctionTemplateDecl", "ClassTemplateDecl"):
            pattern = next(child for child in inner if child["kind"] in (*FUNCTIONS, *RECORDS))
            for child in inner:
                if child is not pattern:
                    self._collect(child, path)
        elif kind in FUNCTIONS:
            if "previousDecl" in node:
                self._declared_before[node["id"]] = node["previousDecl"]
            if body_of(node) is not None:
                self.functions[self._first(node["id"])] = node
        elif kind in RECORDS or kind == "NamespaceDecl":
            name = f"{path}::{node['name']}" if path else str(node.get("name", ""))
            name += _arguments(node)
            if kind in RECORDS and node.get("completeDefinition"):
                self.records[name] = node
            for child in inner:
                self._collect(child, name)


def _arguments(record: Node) -> str:
    """Returns `<4, float>`, which follows the name of a class template's instance."""
    arguments = [child for child in children(record) if child["kind"] == "TemplateArgument"]
    words = (str(each["value"]) if "value" in each else type_of(each) for each in arguments)
    return f"<{', '.join(words)}>" if arguments else ""


def _entry(node: Node) -> Node:
    """Returns the kernel's call in the code that the translation generates for it."""
    return next(each for each in walk(node) if each["kind"] == "CallExpr" and callee_name(each) != "argument")


def _builtin(argument: Node) -> str | None:
    """Returns the attribute that `position<T>::make(t->attribute)` names. Buffers come from `argument<T>(a[i])`."""
    for node in walk(argument):
        if node["kind"] == "CallExpr" and callee_name(node) == "argument":
            return None
    names = [node["name"] for node in walk(argument) if node["kind"] == "MemberExpr" and node.get("name")]
    return next(name for name in reversed(names) if re.match(r"thread|simdgroup|quadgroup|dispatch", name))


def _kernel(entry: Node, tree: Tree, name: str) -> Kernel:
    call = _entry(entry)
    function = tree.function(callee(call))
    assert function is not None
    builtins = {}
    for parameter, argument in zip(parameters_of(function), children(call)[1:], strict=True):
        if attribute := _builtin(argument):
            builtins[parameter["id"]] = attribute
    return Kernel(name, function, builtins)


def _host_names(translated: str) -> list[str]:
    """Returns them in the order of the generated entries."""
    names = dict(re.findall(r'const char (simulator_name_\d+)\[\] = "([^"]*)";', translated))
    table = re.search(r"simulator_kernels\[\] = \{(.*)\};", translated)
    assert table, "the translation wrote no table of kernels"
    return [names[each] for each in re.findall(r"\{(simulator_name_\d+), simulator_parameters", table[1])]


def read_tree(translated: str, dump: str) -> Tree:
    root = json.loads(dump)
    assert root["kind"] == "NamespaceDecl" and root["name"] == NAMESPACE, "clang printed another tree"
    entries, nodes = [], []
    for node in children(root):
        inner = children(node)
        if node["kind"] == "LinkageSpecDecl" and inner and inner[0].get("name", "").startswith(GENERATED):
            entries += [each for each in inner if each["name"].startswith(f"{GENERATED}run_")]
        elif not node.get("name", "").startswith(GENERATED):
            nodes.append(node)
    tree = Tree(Places(translated), nodes)
    for node in nodes:
        tree._collect(node, NAMESPACE)
    for entry, name in zip(entries, _host_names(translated), strict=True):
        tree.kernels.append(_kernel(entry, tree, name))
    return tree


# ---- types -----------------------------------------------------------------------------------------------------------

SCALAR_SIZES = {
    "bool": 1,
    "char": 1,
    "signed char": 1,
    "unsigned char": 1,
    "short": 2,
    "unsigned short": 2,
    "half": 2,
    "bfloat": 2,
    "int": 4,
    "unsigned int": 4,
    "float": 4,
    "long": 8,
    "unsigned long": 8,
}
QUALIFIERS = re.compile(
    r"\b(const|volatile|struct|__private|__local|__global|__global_device|__constant|__generic)\b ?"
)
VECTOR = re.compile(r"(?:metal::)?vec<(.+), (\d+)>$")
MATRIX = re.compile(r"(?:metal::)?simdgroup_matrix<(.+), 8, 8>$")
ALIASES = {
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned int",
    "ulong": "unsigned long",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
}


def element_and_count(text: str) -> tuple[str, int]:
    """`float2[8][2]` is 16 of `float2`. A type that is no array is one of itself."""
    plain = QUALIFIERS.sub("", text).strip()
    count = 1
    while match := re.match(r"(.*?)((?:\[\d+\])+)$", plain):
        for bound in re.findall(r"\[(\d+)\]", match[2]):
            count *= int(bound)
        plain = match[1].strip()
    return plain, count


def bound_of(text: str) -> int:
    """`float2[8][2]` has 8 elements."""
    found = re.search(r"\[(\d+)\]", text)
    return int(found[1]) if found else 0


def is_array(text: str) -> bool:
    return text.rstrip().endswith("]")


def is_fragment(text: str) -> bool:
    return MATRIX.match(canonical(element_and_count(text)[0])) is not None


def canonical(name: str) -> str:
    """Returns the templates for which `float2` and `simdgroup_float8x8` stand."""
    if match := re.match(r"(?:metal::)?simdgroup_(float|half|bfloat)8x8$", name):
        return f"simdgroup_matrix<{match[1]}, 8, 8>"
    if (match := re.match(r"([a-z]+)([234])$", name)) and ALIASES.get(match[1], match[1]) in SCALAR_SIZES:
        return f"vec<{ALIASES.get(match[1], match[1])}, {match[2]}>"
    return ALIASES.get(name, name)


def _literals(tree: Tree) -> dict[str, str]:
    """Returns the program's constants that are written as a literal, by name."""
    result: dict[str, str] = {}
    for node in tree.nodes:
        constants = children(node) if node["kind"] == "EnumDecl" else [node] if node["kind"] == "VarDecl" else []
        for constant in constants:
            values = [each["value"] for each in walk(constant) if each["kind"] == "IntegerLiteral"]
            result |= {constant.get("name", ""): values[0]} if len(values) == 1 else {}
    return result


class Layout:
    """Sizes and alignments in bytes, as in Metal's specification and in clang. Pointers have 8 bytes."""

    def __init__(self, tree: Tree) -> None:
        self._records = tree.records
        self._constants = _literals(tree)

    def size_and_alignment(self, text: str) -> tuple[int, int]:
        name, count = element_and_count(text)
        size, alignment = self._single(canonical(name))
        return size * count, alignment

    def size(self, text: str) -> int:
        return self.size_and_alignment(text)[0]

    def _single(self, name: str) -> tuple[int, int]:
        if name.endswith(("*", "&")) or ")(" in name:
            return 8, 8
        if name in SCALAR_SIZES:
            return SCALAR_SIZES[name], SCALAR_SIZES[name]
        if match := VECTOR.match(name):
            bytes_ = SCALAR_SIZES[ALIASES.get(match[1], match[1])] * (4 if match[2] == "3" else int(match[2]))
            return bytes_, bytes_
        if match := MATRIX.match(name):  # a lane's two elements
            return 2 * SCALAR_SIZES[match[1]], 2 * SCALAR_SIZES[match[1]]
        if name.startswith("metal::atomic<"):
            return self._single(name[len("metal::atomic<") : -1])
        return self._record(name)

    def fields(self, text: str) -> list[str]:
        """Returns the names of a record's fields in their order, or none for another type."""
        record = self._find(canonical(QUALIFIERS.sub("", text).strip()))
        return [each["name"] for each in children(record or {}) if each["kind"] == "FieldDecl"]

    def _find(self, name: str) -> Node | None:
        dumped = re.sub(r"\bfalse\b", "0", re.sub(r"\btrue\b", "-1", name))  # clang names records so
        dumped = re.sub(r"\bk[A-Z]\w*", lambda constant: self._constants.get(constant[0], constant[0]), dumped)
        named = [path for path in self._records if path == dumped or path.endswith(f"::{dumped}")]
        if not named and dumped.endswith(">"):  # a type's name lacks arguments that are the template's defaults
            named = [path for path in self._records if re.match(rf"(.*::)?{re.escape(dumped[:-1])}, [^<>]*>$", path)]
        return self._records[named[0]] if len(named) == 1 else None

    def _record(self, name: str) -> tuple[int, int]:
        record = self._find(name)
        if record is None:
            raise NotUnderstood(f"the size of the type {metal_terms(name)!r} is not known")
        offset, alignment = 0, 1
        for member in children(record):
            if member["kind"] == "FieldDecl":
                size, member_alignment = self.size_and_alignment(type_of(member))
                offset = -(-offset // member_alignment) * member_alignment + size
                alignment = max(alignment, member_alignment)
        return -(-offset // alignment) * alignment, alignment
