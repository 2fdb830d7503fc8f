"""Measures an op's host cost on `mps`: microseconds of a call whose launches go to a launcher that does nothing.

Next to each op it times an op with the same schema that only allocates its output: the time that PyTorch takes to read
the arguments and return the result. It needs the simulated device, whose allocator is timed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import QWEN3_NEXT
from bench.timing import Call, measure
from torch_gdn import _C
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.layers import decoding_points

NOTHING, ADD = "an op that does nothing", "torch.add_"
SOURCE = Path(__file__).with_name("do_nothing.cpp")


def decode_calls(ops: Any, device: torch.device) -> dict[str, Call]:
    """Calls the ops of a namespace for a token of one Qwen3-Next layer."""
    points = decoding_points(QWEN3_NEXT[1:], torch.bfloat16).items()
    calls = {op: to_device(REGISTRY[op].call(point), device) for op, point in points}
    return {op: partial(getattr(ops, op), **call) for op, call in calls.items()}


def load() -> Any:
    """Loads torch.ops.gdn_nothing, once per process."""
    import mps_simulator

    mps_simulator.activate()
    if not hasattr(torch.ops.gdn_nothing, "start"):
        folder = SOURCE.parents[1]
        include = [folder, folder / "csrc", folder / "shaders"]
        mps_simulator.load(SOURCE, include=include, libraries=[str(_C.__file__)])
    return torch.ops.gdn_nothing


def jobs(quick: bool) -> Iterator[tuple[str]]:
    yield from ((name,) for name in decode_calls(torch.ops.gdn, torch.device("cpu")))


def run(op: str, ceilings: Ceilings, seconds: float) -> list[Row]:
    nothing = load()
    device, one = torch.device("mps"), torch.zeros(1)
    calls: dict[str, Callable[[], object]] = {
        OURS: decode_calls(torch.ops.gdn, device)[op],
        NOTHING: decode_calls(nothing, device)[op],
        ADD: lambda: one.add_(1),
    }
    nothing.start()
    try:
        times = measure(calls, torch.device("cpu"), seconds)
    finally:
        nothing.stop()
    row = Row("host", op, "bfloat16", 1, OURS, torch.get_num_threads())
    row.time(times[OURS])
    row.others = {name: times[name].best for name in (NOTHING, ADD)}
    return [row]
