"""Records in caps.tsv the most that any variant takes, for each kernel at a limit: by the model, some of its variants
need more registers than the GPU has. A variant that takes more fails the checks. Others must stay below the limit.

`python -m evidence.proof --only strict-metal --write` records what the sources give.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from evidence.proof.metal.facts import ISA_REGISTERS, Facts

TABLE = Path(__file__).with_name("caps.tsv")


class Taken(NamedTuple):
    """The maxima over several variants."""

    threadgroup_bytes: int
    thread_bytes: int
    registers: int
    bank_passes: int


class Caps(NamedTuple):
    """The caps of a kernel, in the table's order."""

    variants: int
    threadgroup_bytes: int
    thread_bytes: int
    registers: int
    bank_passes: int
    over_isa: int  # number of variants above ISA_REGISTERS, by the model
    most_registers: str  # the name of the variant
    in_models: Taken  # for the variants that models call


COLUMNS = (
    "kernel",
    "variants",
    "threadgroup bytes",
    "array and fragment bytes a thread",
    "registers (model)",
    "bank passes (model)",
    f"variants above {ISA_REGISTERS} registers (model)",
    "most registers in",
    *(f"{what}, in models" for what in ("threadgroup bytes", "array and fragment bytes", "registers", "bank passes")),
)
CAPPED = Taken._fields


def by_kernel(facts: Iterable[Facts], kernels: Mapping[str, str], in_models: Collection[str]) -> dict[str, Caps]:
    """Returns the caps. `kernels` has each variant's kernel, and `in_models` the variants that models call."""
    groups: dict[str, list[Facts]] = {}
    for each in facts:
        groups.setdefault(kernels[each.name], []).append(each)
    return {kernel: _caps(groups[kernel], in_models) for kernel in sorted(groups)}


def _caps(variants: Sequence[Facts], in_models: Collection[str]) -> Caps:
    most = max(variants, key=lambda each: (each.registers, each.name))
    return Caps(
        len(variants),
        *_taken(variants),
        over_isa=sum(each.registers > ISA_REGISTERS for each in variants),
        most_registers=most.name,
        in_models=_taken([each for each in variants if each.name in in_models]),
    )


def _taken(variants: Sequence[Facts]) -> Taken:
    return Taken(*(max((getattr(each, name) for each in variants), default=0) for name in CAPPED))


def text(caps: Mapping[str, Caps]) -> str:
    at_limit = {kernel: row for kernel, row in caps.items() if row.over_isa}
    rows = [COLUMNS, *((kernel, *map(str, (*row[:-1], *row.in_models))) for kernel, row in at_limit.items())]
    return "".join("\t".join(row) + "\n" for row in rows)


def recorded() -> dict[str, Caps]:
    result = {}
    for line in TABLE.read_text().splitlines()[1:]:
        kernel, *row = line.split("\t")
        variants, threadgroup, thread, registers, passes, over = map(int, row[:6])
        in_models = Taken(*map(int, row[7:]))
        result[kernel] = Caps(variants, threadgroup, thread, registers, passes, over, row[6], in_models)
    return result


def over_cap(facts: Iterable[Facts], kernels: Mapping[str, str], caps: Mapping[str, Caps]) -> list[str]:
    """Reports variants that take more than any of their kernel did when the caps were recorded."""
    problems = []
    for each in facts:
        cap = caps.get(kernels[each.name])
        if cap is None:
            if each.registers > ISA_REGISTERS:
                problems.append(
                    f"{each.name}: {each.registers} registers, more than {ISA_REGISTERS}; {TABLE.name} has no kernel "
                    f"{kernels[each.name]}"
                )
            continue
        for name in CAPPED:
            has, limit = getattr(each, name), getattr(cap, name)
            if has > limit:
                problems.append(f"{each.name}: {has} {name.replace('_', ' ')}, the cap of its kernel is {limit}")
    return problems
