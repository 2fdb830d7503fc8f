"""The small inputs that the self-test runs ops on: one or a few per op, of the sizes and dtypes of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gdn.self_test.replace import named
from torch_gdn.testing import REGISTRY, Point
from torch_gdn.testing.attention import PagePoint
from torch_gdn.testing.gdn import RulePoint
from torch_gdn.testing.inputs import Call
from torch_gdn.testing.layers import ConvolutionPoint, RowPoint


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


def cases_of(ops: Iterable[str]) -> list[Case]:
    return [Case(op, point) for op in ops for point in points_of(op)]


def cases_like(op: str, call: Call) -> Iterator[Case]:
    """The op's cases, in the dtypes and head sizes of a call."""
    for point in points_of(op):
        found = facts_of(point, call)
        if op.startswith("chunk_") and call.get("use_gate_in_kernel"):  # a recurrent op's would be gates of channels
            found["gated"] = True
        yield Case(op, replace(point, **found))


def facts_of(point: Point, call: Call) -> dict[str, Any]:
    floating = [x.dtype for x in call.values() if isinstance(x, Tensor) and x.is_floating_point()]
    found: dict[str, Any] = {"dtype": floating[0]} if floating else {}
    if isinstance(point, RulePoint) and {"q", "v"} <= call.keys():
        found |= {"K": call["q"].shape[-1], "V": call["v"].shape[-1], "dtype": call["q"].dtype}
        found |= {"state_v_first": call.get("state_v_first", False)}
        found |= {"normalise": call.get("use_qk_l2norm_in_kernel", False)}
        if "state_pool" in call:
            found["pool"] = call["state_pool"].dtype
    elif isinstance(point, RowPoint) and "x" in call:
        weight = call.get("weight")
        found |= {"D": call["x"].shape[-1], "weight": None if weight is None else weight.dtype}
    elif isinstance(point, ConvolutionPoint):
        state = call.get("state_pool", call.get("initial_state"))
        found |= {"W": call["weight"].shape[1], "weight": call["weight"].dtype}
        found |= {} if state is None else {"state": state.dtype}
    elif isinstance(point, PagePoint):
        found |= facts_of_pages(call)
    return found


def facts_of_pages(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {"D": call["q" if "q" in call else "key"].shape[-1]}
    if "q" in call:
        found["dtype"] = call["q"].dtype
    if "key_cache" in call:
        found["cache"] = call["key_cache"].dtype
    if "key_codebook" in call:  # 2^bits centroids
        found["bits"] = tuple(len(call[f"{name}_codebook"]).bit_length() - 1 for name in ("key", "value"))
    return found


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
