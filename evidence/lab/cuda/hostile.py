"""Calls ops with indices or boundaries out of range, in the device's memory. Kernels must report each of them, and
touch no other memory. The calls are recorded as they would be launched, but they are not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evidence.lab.cuda.record import CaseRecord, Writer
from evidence.lab.cuda.trace import Trace
from torch_gdn_check.registry import REGISTRY, OpEntry, Point
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import MPS


@dataclass(frozen=True)
class Hostile:
    """The smallest call of an op, with these integers as `argument`."""

    entry: OpEntry[Any]
    point: Point
    argument: str
    wrong: Sequence[Any]

    @property
    def name(self) -> str:
        point = self.point
        marks = f"{' packed' if point.packed else ''}{f' {point.algorithm}' if point.algorithm else ''}"
        return f"hostile {self.entry.name}{marks}: {self.argument} {str(list(self.wrong))[:40]}"

    def call(self) -> Call:
        call = self.entry.call(self.point)
        return to_device(call | {self.argument: torch.tensor(self.wrong, dtype=call[self.argument].dtype)}, MPS)

    def run(self, call: Call) -> None:
        self.entry.run(call, self.point)


def hostile() -> Iterator[Hostile]:
    for entry in REGISTRY.values():
        for each in entry.hostile:
            for algorithm in each.algorithms:
                point = replace(entry.small, packed=each.packed, algorithm=algorithm)
                yield Hostile(entry, point, each.argument, each.values)


def record(each: Hostile, writer: Writer) -> CaseRecord:
    call = each.call()
    trace = Trace(each.name, writer, runs=False)
    trace.call(lambda: each.run(call))
    trace.case.is_wrong = True
    writer.add(trace.case)
    return trace.case
