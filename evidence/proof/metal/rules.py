"""Finds what C++ has and Metal lacks, as far as clang's tree shows it. What clang or the translation refuse by
themselves (virtual functions, exceptions, RTTI, globals, C++17, ...) needs no rule here. rule_examples/ has an example
of each, which must be refused, and one that must pass.

Sections are those of the Metal Shading Language Specification of 2025-06-05. The rules are the specification's, even if
Apple's compiler is known to take more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from evidence.proof.metal.front_end import metal_terms
from evidence.proof.metal.tree import (
    GENERATED,
    SCALAR_SIZES,
    VECTOR,
    Kernel,
    Node,
    Tree,
    callee_name,
    canonical,
    children,
    element_and_count,
    parameters_of,
    referenced,
    type_of,
    walk,
)


@dataclass(frozen=True, order=True)
class Problem:
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


DECLARATIONS_WITH_TYPES = ("VarDecl", "ParmVarDecl", "FieldDecl")
# The Metal Shading Language Specification has these attributes of functions and address spaces, and these types, which
# C++ lacks. The translation turns some into clang's own keywords, so they never get here; clang refuses them.
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
    """To clang, an address space that is left out is `__generic`. To Metal it is an error."""
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
    """Returns the functions of the program that this one names."""
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


def no_derived_classes(tree: Tree) -> Iterator[Problem]:
    """Section 1.5.4. Apple's compiler takes MLX's derived classes, which derive from Metal's own type traits."""
    for node in tree.everything():
        if node.get("bases"):
            yield Problem(
                tree.places.of(node), f"'{node.get('name', 'unnamed')}' is derived: Metal has no derived classes"
            )


def spaces_are_disjoint(tree: Tree) -> Iterator[Problem]:
    """Section 4. To clang, constant memory as the translation spells it includes threadgroup memory."""
    for node in tree.everything():
        if node.get("castKind") != "AddressSpaceConversion":
            continue
        before, after = metal_terms(type_of(children(node)[0])), metal_terms(type_of(node))
        if "threadgroup" in before.split() and "constant" in after.split():
            yield Problem(tree.places.of(node), f"'{before}' is made '{after}': they are different memory")


def _library_calls(tree: Tree, prefix: str) -> Iterator[tuple[Node, str]]:
    """Yields calls of Metal's functions whose names start with `prefix`, and the function's type."""
    for node in tree.everything():
        if node["kind"] == "CallExpr" and callee_name(node).startswith(prefix):
            yield node, type_of(children(node)[0])


def atomics_of_64_bits_are_few(tree: Tree) -> Iterator[Problem]:
    """Section 6.15.4.6 has only atomic_min_explicit and atomic_max_explicit, which return nothing."""
    for node, signature in _library_calls(tree, "atomic_"):
        name = callee_name(node)
        if "atomic<unsigned long>" in signature and name not in ("atomic_min_explicit", "atomic_max_explicit"):
            yield Problem(tree.places.of(node), f"{name} does not take an atomic_ulong: only min and max do")


def products_have_one_type(tree: Tree) -> Iterator[Problem]:
    """Section 6.7 declares them with one type of element. Apple's compiler also takes half factors of a float sum,
    which llama.cpp has.
    """
    for node, signature in _library_calls(tree, "simdgroup_multiply"):
        elements = sorted(set(re.findall(r"simdgroup_matrix<(\w+), 8, 8>", signature)))
        if len(elements) > 1:
            yield Problem(
                tree.places.of(node), f"{callee_name(node)} of {' and '.join(elements)}: one type is declared"
            )


SIXTY_FOUR_BITS = ("long", "unsigned long", "long long", "unsigned long long")


def divisions_have_32_bits(tree: Tree) -> Iterator[Problem]:
    """The specification allows a 64-bit division. Apple's GPUs have none, and Mesa's compiler needs hundreds of
    instructions for it. A constant divisor becomes a multiplication or a shift.
    """
    constants = {node["id"] for node in tree.everything() if node["kind"] == "VarDecl" and node.get("constexpr")}
    for function in tree.functions.values():
        for node in walk(function):
            # `i /= n` with a 32-bit i and a 64-bit n is computed in 64 bits.
            computed = node.get("computeResultType", {}).get("qualType") or type_of(node)
            if not re.fullmatch("[/%]=?", node.get("opcode", "")) or canonical(computed) not in SIXTY_FOUR_BITS:
                continue
            names = [each for each in walk(children(node)[1]) if each["kind"] in ("DeclRefExpr", "MemberExpr")]
            if not all(referenced(each) in constants or _is_enumerator(each) for each in names):
                yield Problem(tree.places.of(node), "Apple's GPUs have no 64-bit division: use 32 bits or a constant")


def _is_enumerator(name: Node) -> bool:
    return bool(name.get("referencedDecl", {}).get("kind") == "EnumConstantDecl")


IN_THREADGROUP = ("thread_position_in_threadgroup", "threads_per_threadgroup")
IN_GRID = ("thread_position_in_grid", "threads_per_grid")
POSITIONS = (*IN_GRID, *IN_THREADGROUP, "threadgroup_position_in_grid", "threadgroups_per_grid")
SIMDGROUP_INDICES = (
    *("thread_index_in_simdgroup", "threads_per_simdgroup", "simdgroup_index_in_threadgroup"),
    *("simdgroups_per_threadgroup", "quadgroup_index_in_threadgroup"),
)


def positions_agree(tree: Tree) -> Iterator[Problem]:
    """Section 5.2.3.6 applies to a kernel's parameters."""
    for kernel in tree.kernels:
        place, types = tree.places.of(kernel.function), _types_of_positions(kernel)
        widths = {name: width for name, (_, width) in types.items() if name in POSITIONS}
        if len(set(widths.values())) > 1:
            listed = ", ".join(f"{name} has {width}" for name, width in sorted(widths.items()))
            yield Problem(place, f"positions of a kernel must be all scalars or vectors of one width: {listed}")
        for group in (IN_GRID, IN_THREADGROUP, SIMDGROUP_INDICES):
            result = {name: types[name] for name in group if name in types}
            if len(set(result.values())) > 1:
                yield Problem(place, f"{', '.join(result)} must have one type")


def _types_of_positions(kernel: Kernel) -> dict[str, tuple[str, int]]:
    """Returns the element's type and count for each attribute."""
    result = {}
    for parameter in parameters_of(kernel.function):
        if attribute := kernel.builtins.get(parameter["id"]):
            name = canonical(element_and_count(type_of(parameter))[0])
            vector = VECTOR.match(name)
            result[attribute] = (canonical(vector[1]), int(vector[2])) if vector else (name, 1)
    return result


RULES = (
    *(no_double, no_lambda, no_function_pointers, keywords_are_no_names, pointers_name_their_space, no_recursion),
    *(no_derived_classes, spaces_are_disjoint, atomics_of_64_bits_are_few, products_have_one_type, positions_agree),
    divisions_have_32_bits,
)


def check_rules(tree: Tree) -> list[Problem]:
    return sorted({problem for rule in RULES for problem in rule(tree)})
