"""Times the small ops around the rule, next to a copy of their data and to as many vectorised exponentials.

An op is as fast as possible if it takes no longer than the slower of these two. It must move its data, and compute its
exponentials (one for each sigmoid or silu, two for a softplus and its decay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import QWEN3_NEXT, Layer
from bench.timing import Call, measure
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.layers import ConvolutionPoint, layer_points

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
TOKENS = (1, 1024, 4096)


class Module(NamedTuple):
    call: Call
    exact: Callable[[], Tensor]
    exponentials: int
    bytes: int


MODULES = [name for name, entry in REGISTRY.items() if entry.exponentials and not name.endswith("_bwd")]


def module(name: str, layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device) -> Module:
    """Calls the op as a layer does, without a state."""
    entry, point = REGISTRY[name], layer_points(layer[1:], dtype, tokens)[name]
    if isinstance(point, ConvolutionPoint):
        point = replace(point, from_state=False)
    drawn = entry.call(point)
    on_device = to_device(drawn, device)

    def call() -> Tensor:
        result = entry.run(on_device)
        return result[0] if isinstance(result, tuple) else result

    def exact() -> Tensor:
        return next(iter(entry.exact_outputs(drawn).values()))

    return Module(call, exact, entry.exponentials * call().numel(), entry.bytes(drawn))


def jobs(quick: bool) -> Iterator[tuple[str, int, torch.dtype]]:
    for name in MODULES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for tokens in (16,) if quick else TOKENS:
                yield name, tokens, dtype


def run(name: str, tokens: int, dtype: torch.dtype, ceilings: Ceilings, seconds: float) -> list[Row]:
    measured = module(name, QWEN3_NEXT, tokens, dtype, ceilings.device)
    row = Row("modules", name, str(dtype).removeprefix("torch."), tokens, OURS, torch.get_num_threads())
    result = measured.call()
    assert isinstance(result, Tensor)
    row.error = relative_error(result.cpu().double(), measured.exact())
    if not row.error <= LARGEST_ERROR[dtype]:
        row.note = "wrong: not timed"
        return [row]
    source = torch.randn(measured.bytes // 8, device=ceilings.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"op": measured.call, "copy": lambda: target.copy_(source)}
    times = measure(calls, ceilings.device, seconds)
    row.time(times["op"])
    row.bytes = measured.bytes
    row.others = {"copy": times["copy"].best, "exps": ceilings.exponentials(measured.exponentials)}
    row.floor = max(row.others.values())
    return [row]
