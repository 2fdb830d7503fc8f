"""The small ops around the rule, beside a copy of their data and beside as many vectorised exponentials.

Each is as fast as it can be where it takes no longer than the larger of the two: it has to move its data, and it has to
compute its exponentials (one for each sigmoid or silu, two for a softplus and its decay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import torch_gdn
from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import QWEN3_NEXT, Layer
from bench.timing import Call, measure
from torch_gdn import reference
from torch_gdn.testing.bounds import relative_error

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
TOKENS = (1, 1024, 4096)


class Module(NamedTuple):
    call: Call
    exact: Callable[[], Tensor]
    exponentials: int
    bytes: int


def size_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def conv(layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device) -> Module:
    x = torch.randn(1, tokens, layer.channels).to(device, dtype)
    weight = torch.randn(layer.channels, 4).to(device, dtype)

    def call() -> Tensor:
        return torch_gdn.causal_conv1d(x, weight, activation="silu")[0]

    def exact() -> Tensor:
        return reference.causal_conv1d(x.cpu().double(), weight.cpu().double(), activation="silu")[0]

    return Module(call, exact, x.numel(), 2 * size_of(x) + size_of(weight))


def gated_norm(layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device) -> Module:
    x, g = (torch.randn(1, tokens, layer.HV, layer.V).to(device, dtype) for _ in range(2))
    weight = torch.randn(layer.V).to(device, dtype)

    def call() -> Tensor:
        return torch_gdn.rms_norm_gated(x, g, weight)

    def exact() -> Tensor:
        return reference.rms_norm_gated(x.cpu().double(), g.cpu().double(), weight.cpu().double())

    return Module(call, exact, x.numel(), 3 * size_of(x))


def gating(layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device) -> Module:
    a, b = (torch.randn(1, tokens, layer.HV).to(device, dtype) for _ in range(2))
    A_log, dt_bias = (torch.randn(layer.HV).to(device) for _ in range(2))

    def call() -> Tensor:
        return torch_gdn.gdn_gating(A_log, a, b, dt_bias)[0]

    def exact() -> Tensor:
        inputs = [x.cpu().double() for x in (A_log, a, b, dt_bias)]
        return reference.gdn_gating(inputs[0], inputs[1], inputs[2], inputs[3])[0]

    return Module(call, exact, 3 * a.numel(), size_of(a, b) + 2 * 4 * a.numel())


MODULES = {"causal_conv1d": conv, "rms_norm_gated": gated_norm, "gdn_gating": gating}


def jobs(quick: bool) -> Iterator[tuple[str, int, torch.dtype]]:
    for name in MODULES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for tokens in (16,) if quick else TOKENS:
                yield name, tokens, dtype


def run(name: str, tokens: int, dtype: torch.dtype, ceilings: Ceilings, seconds: float) -> list[Row]:
    torch.manual_seed(0)
    module = MODULES[name](QWEN3_NEXT, tokens, dtype, ceilings.device)
    row = Row("modules", name, str(dtype).removeprefix("torch."), tokens, OURS, torch.get_num_threads())
    result = module.call()
    assert isinstance(result, Tensor)
    row.error = relative_error(result.cpu().double(), module.exact())
    if not row.error <= LARGEST_ERROR[dtype]:
        row.note = "wrong: not timed"
        return [row]
    source = torch.randn(module.bytes // 8, device=ceilings.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"op": module.call, "copy": lambda: target.copy_(source)}
    times = measure(calls, ceilings.device, seconds)
    row.time(times["op"])
    row.bytes = module.bytes
    row.others = {"copy": times["copy"].best, "exps": ceilings.exponentials(module.exponentials)}
    row.floor = max(row.others.values())
    return [row]
