"""Looks in LLVM's text for what no kernel's code may have."""

from __future__ import annotations

import re

DIVISION = re.compile(r"= ([us](?:div|rem))(?: exact)? i64 [^,]+, (\S+)")
ALLOCA = re.compile(r"^\s*(%[\w.]+) = alloca ([^,\n]+)", re.MULTILINE)
FIELD = re.compile(
    r'^\s*(%[\w.]+) = getelementptr[^\n]*?%"struct\.metal::vec[^"]*", ptr addrspace\(([12])\) [^\n]*$', re.MULTILINE
)
SPACES = {"1": "device", "2": "constant"}


def source_problems(code: str) -> list[str]:
    """Finds, before optimisation, a load of one element through a pointer to a vector, which one load could give
    whole."""
    fields = {result[1]: SPACES[result[2]] for result in FIELD.finditer(code)}
    loads = re.findall(r"= load (?!<)(\w+), ptr addrspace\(\d\) (%[\w.]+)", code)
    scalar = [(kind, fields[name]) for kind, name in loads if name in fields]
    return [f"a {space} vector's element is loaded alone, as {kind}" for kind, space in sorted(set(scalar))]


def _is_shift(divisor: str) -> bool:
    """Returns whether the divisor is a constant power of two."""
    return divisor.isdigit() and int(divisor).bit_count() == 1


def optimised_problems(code: str) -> list[str]:
    """Finds 64-bit divisions, which take the GPU hundreds of instructions, and arrays that an index keeps in memory."""
    problems = []
    divisions = [kind for kind, by in DIVISION.findall(code) if not _is_shift(by)]
    if divisions:
        problems.append(f"{len(divisions)} divisions of 64 bits ({', '.join(sorted(set(divisions)))})")
    problems += [f"{name} is left in memory: {kind}" for name, kind in ALLOCA.findall(code)]
    return problems
