"""The most that a variant of each kernel takes, recorded in caps.tsv: one that takes more fails the checks.

`python -m proof --only strict-metal --write` records what the sources give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from proof.metal.facts import ISA_REGISTERS, Facts

TABLE = Path(__file__).with_name("caps.tsv")


class Caps(NamedTuple):
    """Of a kernel, in the table's order."""

    variants: int
    threadgroup_bytes: int
    thread_bytes: int
    registers: int
    bank_passes: int
    over_isa: int  # variants above ISA_REGISTERS, by the model
    most_registers: str  # the variant


COLUMNS = (
    "kernel",
    "variants",
    "threadgroup bytes",
    "array and fragment bytes a thread",
    "registers (model)",
    "bank passes (model)",
    f"variants above {ISA_REGISTERS} registers (model)",
    "most registers in",
)
CAPPED = ("threadgroup_bytes", "thread_bytes", "registers", "bank_passes")


def by_kernel(facts: Iterable[Facts], kernels: Mapping[str, str]) -> dict[str, Caps]:
    """`kernels` has the kernel of each variant's name."""
    groups: dict[str, list[Facts]] = {}
    for each in facts:
        groups.setdefault(kernels[each.name], []).append(each)
    return {kernel: _caps(groups[kernel]) for kernel in sorted(groups)}


def _caps(variants: Sequence[Facts]) -> Caps:
    most = max(variants, key=lambda each: (each.registers, each.name))
    return Caps(
        variants=len(variants),
        threadgroup_bytes=max(each.threadgroup_bytes for each in variants),
        thread_bytes=max(each.thread_bytes for each in variants),
        registers=most.registers,
        bank_passes=max(each.bank_passes for each in variants),
        over_isa=sum(each.registers > ISA_REGISTERS for each in variants),
        most_registers=most.name,
    )


def text(caps: Mapping[str, Caps]) -> str:
    rows = [COLUMNS, *((kernel, *map(str, row)) for kernel, row in caps.items())]
    return "".join("\t".join(row) + "\n" for row in rows)


def recorded() -> dict[str, Caps]:
    found = {}
    for line in TABLE.read_text().splitlines()[1:]:
        kernel, variants, threadgroup, thread, registers, passes, over, most = line.split("\t")
        found[kernel] = Caps(int(variants), int(threadgroup), int(thread), int(registers), int(passes), int(over), most)
    return found


def over_cap(facts: Iterable[Facts], kernels: Mapping[str, str], caps: Mapping[str, Caps]) -> list[str]:
    """Variants that take more than any of their kernel's did when the caps were recorded."""
    problems = []
    for each in facts:
        cap = caps.get(kernels[each.name])
        if cap is None:
            problems.append(f"{each.name}: {TABLE.name} has no kernel {kernels[each.name]}")
            continue
        for name in CAPPED:
            has, limit = getattr(each, name), getattr(cap, name)
            if has > limit:
                problems.append(f"{each.name}: {has} {name.replace('_', ' ')}, the cap of its kernel is {limit}")
    return problems
