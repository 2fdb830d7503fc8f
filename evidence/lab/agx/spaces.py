"""Gives pointers in LLVM's code an address space. clang leaves `this` and references generic, which Mesa does not
accept.

The code is already inlined, so each pointer has one origin: an argument, a variable, or a pointer derived from one.
Blocks of constants are device memory for clang. They become constant memory, for which Mesa has uniform registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from evidence.lab.agx.dialect import CONSTANT

PRIVATE, DEVICE, CONSTANTS, GENERIC = 0, 1, 2, 4
NAME = r"%[\w.]+"
ATTRIBUTES = (
    r"(?: noundef| nonnull| align \d+| dereferenceable\(\d+\)| nocapture| readonly| writeonly| readnone| noalias)*"
)
CAST = re.compile(rf"\s*({NAME}) = addrspacecast ptr(?: addrspace\((\d)\))? ({NAME}) to ptr addrspace\(4\)")
ELEMENT = re.compile(rf"\s*({NAME}) = getelementptr .*?ptr addrspace\((\d)\) ({NAME}|@[\w.]+)")
MERGE = re.compile(rf"\s*({NAME}) = phi ptr addrspace\((\d)\) (.*)")
CHOICE = re.compile(rf"\s*({NAME}) = select i1 \S+ ptr addrspace\((\d)\) ({NAME}), ptr addrspace\(\d\) ({NAME})")
OF_VARIABLE = re.compile(
    rf"ptr addrspace\(4\)({ATTRIBUTES}) addrspacecast \(ptr addrspace\((\d)\) (@[\w.]+) to ptr addrspace\(4\)\)"
)
ELEMENT_OF_VARIABLE = re.compile(
    rf"ptr addrspace\(4\)({ATTRIBUTES}) (getelementptr (?:inbounds )?\([^()]*, ptr addrspace\((\d)\) @)"
)
OPERAND = r"(ptr(?: addrspace\((\d)\))?[^%@]*)([%@][\w.]+(?:, i64 \d+\))?)"  # the last part ends a constant's element
COPY = re.compile(rf"@llvm\.memcpy\.p\d\.p\d\.i64\({OPERAND}, {OPERAND}")


def pointer(space: int) -> str:
    return f"ptr addrspace({space})" if space else "ptr"


class _Spaces:
    """The space of each pointer, by name, if its definition says another."""

    def __init__(self, lines: list[str]) -> None:
        self.of = {name: CONSTANTS for line in lines if line.startswith("define") for name in _constants(line)}
        self.mixed: set[str] = set()  # pointers into constants on one path and into device memory on another
        while self._spread(lines):
            pass

    def _spread(self, lines: Iterable[str]) -> bool:
        changed = False
        for line in lines:
            name, space = self._defined(line)
            if name and space is not None and name not in self.mixed and self.of.get(name) != space:
                self.of[name] = space
                changed = True
        return changed

    def _defined(self, line: str) -> tuple[str, int | None]:
        if result := CAST.match(line):
            return result[1], self.of.get(result[3], int(result[2] or PRIVATE))
        if result := ELEMENT.match(line):
            written = int(result[2])
            known = written if result[3].startswith("@") and written != GENERIC else None
            return result[1], self.of.get(result[3], known)
        if result := MERGE.match(line):
            return result[1], self._common(result[1], int(result[2]), re.findall(rf"\[ ({NAME})", result[3]))
        if result := CHOICE.match(line):
            return result[1], self._common(result[1], int(result[2]), [result[3], result[4]])
        return "", None

    def _common(self, name: str, written: int, sources: Iterable[str]) -> int | None:
        spaces = {self.of.get(source, written) for source in sources if source in self.of or written != GENERIC}
        if len(spaces) > 1:
            self.mixed.add(name)
        return spaces.pop() if len(spaces) == 1 else None


def _constants(line: str) -> list[str]:
    return re.findall(rf"%{CONSTANT}\d+", line)


def resolved(code: str) -> str:
    """Returns LLVM's text in which no pointer with an origin is generic, ready for OpenCL's SPIR-V."""
    code = OF_VARIABLE.sub(r"ptr addrspace(\2)\1 \3", code)
    lines = ELEMENT_OF_VARIABLE.sub(r"ptr addrspace(\3)\1 \2", code).split("\n")
    spaces = _Spaces(lines)
    back = _through_integers(lines, spaces)
    for name in back | spaces.mixed:
        spaces.of.pop(name, None)
    return _copies(_old_opencl("\n".join(_rewritten(line, spaces.of) for line in lines)))


def _through_integers(lines: list[str], spaces: _Spaces) -> set[str]:
    """Turns a pointer into constants that meets device pointers into a device pointer, through an integer."""
    back: set[str] = set()
    for line in lines:
        result = MERGE.match(line) or CHOICE.match(line)
        if result and result[1] in spaces.mixed:
            back |= {name for name in re.findall(NAME, line) if spaces.of.get(name) == CONSTANTS}
    for i, line in enumerate(lines):
        result = ELEMENT.match(line)
        if result and result[1] in back:
            name, source = result[1], result[3]
            element = line.replace(f"ptr addrspace({result[2]}) {source}", f"{pointer(CONSTANTS)} {source}")
            lines[i] = (
                f"{element.replace(f'{name} =', f'{name}.c =')}\n"
                f"  {name}.i = ptrtoint {pointer(CONSTANTS)} {name}.c to i64\n"
                f"  {name} = inttoptr i64 {name}.i to {pointer(DEVICE)}"
            )
    return back


def _rewritten(line: str, of: dict[str, int]) -> str:
    if "inttoptr" in line:
        return line
    if result := CAST.match(line):
        line = f"  {result[1]} = getelementptr i8, {pointer(of[result[1]])} {result[3]}, i64 0"
    line = re.sub(
        rf"ptr(?: addrspace\(\d\))?({ATTRIBUTES}) ({NAME})",
        lambda use: f"{pointer(of[use[2]])}{use[1]} {use[2]}" if use[2] in of else use[0],
        line,
    )
    result = MERGE.match(line)
    if result and result[1] in of:
        line = line.replace(f"phi ptr addrspace({result[2]})", f"phi {pointer(of[result[1]])}", 1)
    return line


def _old_opencl(code: str) -> str:
    """Changes the code to say OpenCL 2.0, because the translator to SPIR-V does not know OpenCL's functions in C++."""
    code = re.sub(r"^!opencl\.cxx\.version.*\n", "", code, flags=re.MULTILINE)
    version = re.search(r"!opencl\.ocl\.version = !\{(!\d+)\}", code)
    if version is None:
        return code
    return re.sub(rf"^{version[1]} = .*$", f"{version[1]} = !{{i32 2, i32 0}}", code, flags=re.MULTILINE)


def _copies(code: str) -> str:
    """Gives each pair of address spaces its own memcpy function."""
    code = COPY.sub(lambda m: f"@llvm.memcpy.p{m[2] or 0}.p{m[5] or 0}.i64({m[1]}{m[3]}, {m[4]}{m[6]}", code)
    for to, source in sorted(set(re.findall(r"call void @llvm\.memcpy\.p(\d)\.p(\d)\.i64", code))):
        if f"declare void @llvm.memcpy.p{to}.p{source}.i64" not in code:
            arguments = f"{pointer(int(to))}, {pointer(int(source))}, i64, i1"
            code += f"\ndeclare void @llvm.memcpy.p{to}.p{source}.i64({arguments})\n"
    return code
