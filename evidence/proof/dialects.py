"""Finds kernel templates in the text of a Metal program, for proofs that rewrite them in another dialect of C++.

The text is what the host passes to Metal's compiler, with includes in place
(evidence.proof.metal.front_end.shader_text). Every line stays where it is, so that another compiler's messages name the
shader's own lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# A device without constant text keeps the line, which alone identifies the error.
LINE_ONLY_REPORT = """\
METAL_FUNC void report_line(device ErrorLog* log, uint line) {
  const uint slot = atomic_fetch_add_explicit(&log->count, 1u, memory_order_relaxed);
  if (slot < 30) log->messages[slot].line = line;
}
"""


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: a buffer, a block of constants (a reference), or a position of the thread."""

    type: str  # as Metal writes it: `device const T*`, `constant NormParameters&`, `uint3`
    name: str
    attribute: str  # buffer, threadgroup, thread_index_in_simdgroup, ...
    binding: int | None  # for a buffer or threadgroup memory

    @property
    def is_block(self) -> bool:
        return self.type.endswith("&")

    @property
    def value_type(self) -> str:
        """Returns `NormParameters` for `constant NormParameters&`."""
        return self.type.rstrip("&* ").rsplit(" ", 1)[-1]


@dataclass(frozen=True)
class KernelTemplate:
    """A kernel's place in its program, and its parts. `template` is empty for a plain function."""

    name: str
    template: tuple[tuple[str, str], ...]  # (`typename`, `T`), (`int`, `K`)
    defaults: tuple[str, ...]  # those of the last parameters
    parameters: tuple[Parameter, ...]
    begin: int  # at `template <` or `[[kernel]]`
    body: int  # after the body's `{`
    body_end: int  # at its `}`

    @property
    def buffers(self) -> list[Parameter]:
        """Returns buffers and blocks, in the order of their bindings."""
        bound = [each for each in self.parameters if each.attribute == "buffer"]
        return sorted(bound, key=lambda each: each.binding or 0)

    def constants(self, arguments: Sequence[str]) -> list[str]:
        """Returns a declaration for each template parameter, in C++ of any dialect."""
        left_out = len(self.template) - len(arguments)
        if not 0 <= left_out <= len(self.defaults):
            raise ValueError(f"{self.name} takes {len(self.template)} template arguments, got {list(arguments)}")
        return [
            f"typedef {argument} {name};" if kind in ("typename", "class") else f"constexpr {kind} {name} = {argument};"
            for (kind, name), argument in zip(
                self.template, [*arguments, *self.defaults[len(self.defaults) - left_out :]], strict=True
            )
        ]


def without_comments(text: str) -> str:
    """Removes comments to the end of the line, but not inside string literals."""
    return re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda found: found[1] or "", text)


def closing(text: str, opening: int) -> int:
    """Returns where the bracket at `opening` closes. Ignores brackets of other kinds."""
    pair = {"(": ")", "{": "}", "<": ">"}[text[opening]]
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == text[opening]) - (text[at] == pair)
        if depth == 0:
            return at
    raise ValueError(f"the {text[opening]} of {text[opening : opening + 40]!r} has no {pair}")


def split_at_commas(text: str) -> list[str]:
    """Splits at the commas outside brackets of any kind."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def find_kernel(text: str, kernel: str) -> KernelTemplate:
    """Returns the template of that name, in a text without comments."""
    head = re.compile(
        r"(?:template\s*<(?P<template>[^>]*)>\s*)?(?:\[\[kernel(?:, [^\]]*)?\]\]|\bkernel)\s+void\s+"
        rf"{re.escape(kernel)}\s*(?=\()"
    )
    result = head.search(text)
    if result is None:
        raise ValueError(f"no kernel {kernel} in a program of {text.count(chr(10))} lines")
    end = closing(text, result.end())
    body = text.index("{", end)
    declared = [part.split("=") for part in split_at_commas(result["template"] or "") if part]
    pairs = [part.strip().rsplit(" ", 1) for part, *_ in declared]
    parameters: list[Parameter] = []
    for part in split_at_commas(text[result.end() + 1 : end]):
        parameters.append(_parameter(part, len(parameters)))
    return KernelTemplate(
        kernel,
        tuple((kind.strip(), name) for kind, name in pairs),
        tuple(default.strip() for _, *defaults in declared for default in defaults),
        tuple(parameters),
        result.start(),
        body + 1,
        closing(text, body),
    )


def _parameter(text: str, position: int) -> Parameter:
    """Reads a parameter. One without an attribute is a buffer, bound in the order of the parameters."""
    result = re.fullmatch(r"(.*?)\s*(\w+)\s*(?:\[\[\s*(\w+)\s*(?:\((\d+)\))?\s*\]\])?", text, re.DOTALL)
    if result is None or not result[1]:
        raise ValueError(f"expected a parameter with a type and a name, got {text!r}")
    kind, name, attribute, binding = result.groups()
    if attribute is None:
        attribute, binding = "buffer", str(position)
    kind = re.sub(r"\s+([&*])", r"\1", " ".join(kind.split()))
    return Parameter(kind, name, attribute, None if binding is None else int(binding))


def errors_by_line(text: str) -> str:
    """Returns the text with reports of the line alone, because some compilers cannot keep texts in constant memory."""
    for name, instead in (("void report_error", LINE_ONLY_REPORT), ("int append_text", ""), ("int append_number", "")):
        start = text.find(f"METAL_FUNC {name}(")
        if start >= 0:
            end = closing(text, text.index("{", start)) + 1
            lines = text.count("\n", start, end) - instead.count("\n")
            text = text[:start] + instead + "\n" * lines + text[end:]
    while (start := text.find("report_error(")) >= 0:
        opening = text.index("(", start)
        end = closing(text, opening)
        log = text[opening + 1 : end].partition(",")[0].strip()
        text = text[:start] + f"report_line({log}, __LINE__)" + "\n" * text.count("\n", start, end) + text[end + 1 :]
    return text
