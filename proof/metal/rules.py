"""What Metal has not and C++ has, as far as clang's tree shows it. What clang or the translation refuse by themselves
(virtual functions, exceptions, RTTI, globals, C++17, ...) needs no rule here; rule_examples/ has an
example of each, which must be refused, beside one that must pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from proof.metal.front_end import metal_terms
from proof.metal.tree import GENERATED, SCALAR_SIZES, Node, Tree, type_of, walk


@dataclass(frozen=True, order=True)
class Problem:
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


DECLARATIONS_WITH_TYPES = ("VarDecl", "ParmVarDecl", "FieldDecl")
# Metal Shading Language Specification: function and address space attributes, and the types that C++ has not. Those
# that the translation turns into clang's own keywords never get here; clang refuses them.
KEYWORDS = {
    *("kernel", "vertex", "fragment", "visible", "stitchable", "intersection", "mesh", "object"),
    *("device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"),
    *("half", "bfloat", "uchar", "ushort", "uint", "ulong", "size_t", "ptrdiff_t", "sampler", "texture", "imageblock"),
    *(f"{scalar}{width}" for scalar in SCALAR_SIZES for width in (2, 3, 4) if " " not in scalar),
    *(f"u{scalar}{width}" for scalar in ("char", "short", "int", "long") for width in (2, 3, 4)),
}


def _implicit(node: Node) -> bool:
    return bool(node.get("isImplicit")) or str(node.get("name", "")).startswith(GENERATED)


def no_double(tree: Tree) -> Iterator[Problem]:
    for node in tree.everything():
        if re.search(r"\bdouble\b", type_of(node)):
            yield Problem(tree.places.of(node), "Metal has no double")


def no_lambda(tree: Tree) -> Iterator[Problem]:
    for node in tree.everything():
        if node["kind"] == "LambdaExpr":
            yield Problem(tree.places.of(node), "Metal 3.1 has no lambda expressions")


def no_function_pointers(tree: Tree) -> Iterator[Problem]:
    for node in tree.everything():
        is_pointer = re.search(r"\((\w+ )*[\w:]*[*&]", type_of(node)) and not _implicit(node)
        if is_pointer and node["kind"] in (*DECLARATIONS_WITH_TYPES, "NonTypeTemplateParmDecl"):
            name = node.get("name", "unnamed")
            yield Problem(tree.places.of(node), f"'{name}' points to a function: Metal has no such")


def keywords_are_no_names(tree: Tree) -> Iterator[Problem]:
    for node in tree.everything():
        if node["kind"].endswith("Decl") and node.get("name") in KEYWORDS and not _implicit(node):
            yield Problem(tree.places.of(node), f"'{node['name']}' is a word of Metal's and cannot name anything else")


def pointers_name_their_space(tree: Tree) -> Iterator[Problem]:
    """An address space that is left out is `__generic` to clang, and an error to Metal."""
    for root in tree.nodes:
        yield from _generic_pointers(tree, root)


def _generic_pointers(tree: Tree, node: Node) -> Iterator[Problem]:
    if _implicit(node):
        return
    if node["kind"] in DECLARATIONS_WITH_TYPES and "__generic" in type_of(node):
        name, text = node.get("name", "unnamed"), metal_terms(node["type"]["qualType"])
        yield Problem(
            tree.places.of(node), f"'{name}' points or refers to no address space: {text.replace('__generic ', '')}"
        )
    for child in node.get("inner", ()):
        if child:
            yield from _generic_pointers(tree, child)


def _called(tree: Tree, function: Node) -> list[Node]:
    """The functions of the program that this one names."""
    named = {id(each): each for node in walk(function) if (each := tree.function(node)) is not None}
    return list(named.values())


def no_recursion(tree: Tree) -> Iterator[Problem]:
    calls = {id(function): _called(tree, function) for function in tree.functions.values()}
    for function in tree.functions.values():
        open_, seen = [function], set()
        while open_:
            for next_ in calls[id(open_.pop())]:
                if id(next_) not in seen:
                    seen.add(id(next_))
                    open_.append(next_)
        if id(function) in seen:
            yield Problem(tree.places.of(function), f"'{function['name']}' calls itself: no recursion in Metal")


RULES = (no_double, no_lambda, no_function_pointers, keywords_are_no_names, pointers_name_their_space, no_recursion)


def check_rules(tree: Tree) -> list[Problem]:
    return sorted({problem for rule in RULES for problem in rule(tree)})
