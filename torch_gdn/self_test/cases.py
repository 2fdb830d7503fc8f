"""Lists the small inputs that the self-test runs ops on: one or a few per op, in the sizes and dtypes of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gdn.self_test.replace import named
from torch_gdn_check.registry import REGISTRY, Point
from torch_gdn_check.registry.inputs import Call


@dataclass(frozen=True)
class Case:
    """An op at a point."""

    op: str
    point: Point

    @property
    def name(self) -> str:
        return f"{self.op} {self.point.name}"


def points_of(op: str) -> tuple[Point, ...]:
    entry = REGISTRY[op]
    return tuple(entry.self_test or entry.quick or entry.points[:1])


def cases_of(ops: Iterable[str], dtypes: Iterable[torch.dtype] = ()) -> list[Case]:
    """Returns the ops' cases in each of the dtypes. If there are none, a point keeps its own."""
    points = [(op, point) for op in ops for point in points_of(op)]
    return (
        [Case(*each) for each in points]
        if not dtypes
        else [Case(op, in_dtype(point, dtype)) for op, point in points for dtype in dtypes]
    )


def in_dtype(point: Point, dtype: torch.dtype) -> Point:
    """Returns the point with another dtype for all of its tensors that have its dtype."""
    changes: dict[str, Any] = {x.name: dtype for x in fields(point) if getattr(point, x.name) == point.dtype}
    return replace(point, **changes)


def cases_like(op: str, call: Call) -> Iterator[Case]:
    """Returns the op's cases with the dtypes and head sizes of a call."""
    for point in points_of(op):
        found = point.facts_of(call)
        if op.startswith("chunk_") and call.get("use_gate_in_kernel"):  # recurrent ops: channel gates
            found["gated"] = True
        yield Case(op, replace(point, **found))


class cases_of_calls(TorchDispatchMode):
    """Collects the cases like the calls of torch_gdn's ops inside.

    Attributes:
        cases: each case once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cases: dict[Case, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gdn":
            op = func._schema.name.removeprefix("gdn::")
            self.cases |= dict.fromkeys(cases_like(op, named(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))
