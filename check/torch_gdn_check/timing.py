"""Times every op alone, and decode and prefill next to other code for the same work."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import torch_gdn
from torch_gdn import _C, reference
from torch_gdn._timing import median_seconds, samples, wait
from torch_gdn.tools.tune import rule_inputs
from torch_gdn_check.peers import Call, Prepared, mlx_rule, prepared_function, transformers_rule
from torch_gdn_check.registry import REGISTRY, OpEntry, Point
from torch_gdn_check.registry.attention import PagePoint
from torch_gdn_check.registry.aura import AuraPoint, CodecPoint
from torch_gdn_check.registry.bounds import relative_error
from torch_gdn_check.registry.experts import ExpertPoint
from torch_gdn_check.registry.gdn import RulePoint
from torch_gdn_check.registry.inputs import doubled, to_device
from torch_gdn_check.registry.layers import ConvolutionPoint, RowPoint
from torch_gdn_check.registry.models import MODELS, QWEN3_NEXT
from torch_gdn_check.registry.on_the_cpu import on_the_cpu
from torch_gdn_check.steps import Outcome, Skipped, on_simulated_device

LARGEST_ERROR = 1e-2  # for outputs in bfloat16: rounding alone gives 2e-3, and wrong outputs give 1e-1 and more
COPIED_BYTES = 1 << 27
WARM_SECONDS = 0.2  # the GPU works this long before the first time, because its clock is low when idle


def refuse_simulated(device: torch.device) -> None:
    if on_simulated_device() and device.type == "mps":
        raise Skipped("times on the simulated device say nothing about a Mac")


def warmed(call: Call, device: torch.device) -> None:
    """Compiles, and warms the GPU up to its full clock."""
    start = time.perf_counter()
    while True:
        call()
        wait(device)
        if time.perf_counter() - start >= WARM_SECONDS:
            return


def seconds_by_gpu_clock(call: Call, repeats: int, calls: int) -> float:
    """Returns seconds per call between the start and the end of a command buffer. The host's wait is not in them."""
    result = []
    for _ in range(repeats):
        torch.mps.synchronize()
        for _ in range(calls):
            call()
        result.append(_C.wait_and_time() / calls)
    return statistics.median(result)


# Every op


@cache
def copy_rate(device: torch.device) -> float:
    """Returns the bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = partial(target.copy_, source)
    warmed(call, device)
    return 2 * COPIED_BYTES / median_seconds(call, device, repeats=5, calls=4)


def timed_point(entry: OpEntry[Any]) -> Point:
    """Returns the op's first quick point, at the sizes of a model's layer."""
    H, HV, K, V = MODELS[QWEN3_NEXT]
    point: Point = next(iter([*entry.quick, *entry.points]))
    if isinstance(point, RulePoint):
        tokens = 1 if "recurrent" in entry.name else 1024 if entry.name.startswith("chunk_") else 256
        return replace(point, K=K, V=V, H=H, HV=HV, tokens=tokens)
    if isinstance(point, RowPoint):
        return replace(point, D=V, heads=HV, tokens=1024, batch=1)
    if isinstance(point, ConvolutionPoint):
        return replace(point, D=2 * H * K + HV * V, tokens=1 if "update" in entry.name else 1024, batch=1)
    if isinstance(point, CodecPoint):
        return replace(point, tokens=1024)
    if isinstance(point, AuraPoint):
        return replace(point, keys=2048, batch=1)
    if isinstance(point, ExpertPoint):
        active = 256 if entry.name in ("moe_logits", "moe_router") else 8  # the entry counts the bytes of all experts
        return replace(point, T=1, E=active, k=8, D=2048, I=512, IS=512)
    if isinstance(point, PagePoint):
        return replace(point, queries=(1,), keys=(2048,), longest=0)
    return point


def check_op_time(device: torch.device, op: str, point: Point, repeats: int = 7, calls: int = 24) -> Outcome:
    """Measures the encoding time, the GPU's time, and how far its rate is from a copy's.

    gpu_us is the time until the device was done; gpu_clock_us is that of the last command buffer by the GPU's clock. An
    op that calls one of PyTorch's graphs has several command buffers.
    """
    refuse_simulated(device)
    entry = REGISTRY[op]
    call = entry.call(point)
    run = partial(entry.run, to_device(call, device), point)
    warmed(run, device)
    encoded, waited = (statistics.median(each) for each in zip(*samples(run, device, repeats, calls), strict=True))
    moved, seconds = entry.bytes(call), waited if device.type == "mps" else encoded
    figures = {"encode_us": encoded * 1e6, "gpu_us": waited * 1e6}
    if device.type == "mps":
        figures["gpu_clock_us"] = seconds_by_gpu_clock(run, repeats, calls) * 1e6
    rate = moved / seconds
    return Outcome(figures | {"bytes": moved, "gb_per_second": rate / 1e9, "share_of_copy": rate / copy_rate(device)})


# Next to other code


def layer_inputs(shape: tuple[int, int, int, int], tokens: int) -> dict[str, Any]:
    """Returns the inputs that a model of these (H, HV, K, V) passes to its delta rule, in bfloat16, with a state."""
    return rule_inputs(shape, tokens, 1, torch.bfloat16)


def exact_output(inputs: dict[str, Any]) -> Tensor:
    with on_the_cpu():
        return reference.fused_recurrent_gated_delta_rule(**{name: doubled(x) for name, x in inputs.items()})[0]


def contenders(inputs: dict[str, Any], device: torch.device) -> dict[str, Prepared | str]:
    """Prepares each contender, or says why it is skipped."""
    on_device: dict[str, Any] = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    is_decode = inputs["q"].size(1) == 1
    ours = torch_gdn.fused_recurrent_gated_delta_rule if is_decode else torch_gdn.chunk_gated_delta_rule
    theirs = "torch_recurrent_gated_delta_rule" if is_decode else "torch_chunk_gated_delta_rule"

    def mlx() -> Prepared:
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        normal = {name: normalize(inputs[name].float(), dim=-1) for name in ("q", "k")}
        return mlx_rule(**(tensors | normal), device=device)

    result: dict[str, Prepared | str] = {"torch_gdn": prepared_function(partial(ours, **on_device))}
    for name, prepare in {"transformers": lambda: transformers_rule(theirs, on_device), "mlx": mlx}.items():
        try:
            result[name] = prepare()
        except Skipped as reason:
            result[name] = str(reason)
    return result


def check_timing(
    device: torch.device, shape: tuple[int, int, int, int], tokens: int, repeats: int, calls: int
) -> Outcome:
    """Returns median times. Every output must be near the exact one, or the times compare different things."""
    refuse_simulated(device)
    inputs = layer_inputs(shape, tokens)
    result = contenders(inputs, device)
    _, HV, K, V = shape
    state_bytes = 2 * 4 * HV * K * V  # read and written in float32
    return compared(result, exact_output(inputs), device, repeats, calls, tokens=tokens, state_bytes=state_bytes)


def compared(
    contenders: dict[str, Prepared | str], exact: Tensor, device: torch.device, repeats: int, calls: int, **facts: Any
) -> Outcome:
    """Times what can run here, and divides by torch_gdn's time. An output far from the exact one is a problem."""
    figures, wrong = facts, []
    for name, contender in contenders.items():
        if isinstance(contender, str):
            figures[name] = {"skipped": contender}
            continue
        error = relative_error(contender.output()[0].cpu().double(), exact)
        warmed(contender.call, device)
        figures[name] = {"seconds": median_seconds(contender.call, device, repeats, calls), "error": error}
        if not error <= LARGEST_ERROR:  # also true for nan
            wrong.append(f"{name}'s output has error {error:.3g}, expected at most {LARGEST_ERROR}")
    timed = {name: figures[name] for name in contenders if "seconds" in figures[name]}
    for name in timed.keys() - {"torch_gdn"}:
        timed[name]["ratio"] = timed[name]["seconds"] / timed["torch_gdn"]["seconds"]
    figures["fastest"] = min(timed, key=lambda name: timed[name]["seconds"])
    return Outcome(figures, "; ".join(wrong))
