"""Times every op alone, prefill algorithms, and decode, prefill, experts and weights of 4 bits next to other code."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

import torch_gdn
from torch_gdn import _C, reference
from torch_gdn._timing import median_seconds, samples, wait
from torch_gdn.quantized import pack
from torch_gdn.tools import tune
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
from torch_gdn_check.steps import Outcome, Skipped, refuse_simulated

LARGEST_ERROR = 1e-2  # for outputs in bfloat16: rounding alone gives 2e-3, and wrong outputs give 1e-1 and more
COPIED_BYTES = 1 << 27
WARM_SECONDS = 0.2  # the GPU works this long before the first time, because its clock is low when idle


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


# Next to the kernels that PyTorch itself has for mps

GROUP, TILES = 64, 2  # columns per group; tiles of PyTorch's packing


def need(op: str, since: str, device: torch.device) -> None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", device.type.upper()):
        raise Skipped(f"torch {torch.__version__} has no aten::{op} for {device.type}; it has one since {since}")


def one_output(call: Any) -> Prepared:
    return Prepared(call, lambda: (call(), torch.empty(0)))


def check_experts(device: torch.device, tokens: int, sizes: tuple[int, int, int] = (64, 2048, 512)) -> Outcome:
    """`sizes` has the number of experts, of which a token takes 8, and the sizes of x and of a hidden vector."""
    refuse_simulated(device)
    need("_grouped_mm", "2.15", device)
    E, D, size = sizes
    random = torch.Generator().manual_seed(0)
    call = {
        "x": torch.randn(tokens, D, generator=random).bfloat16(),
        "gate_up": (torch.randn(E, 2 * size, D, generator=random) * D**-0.5).bfloat16(),
        "down": (torch.randn(E, D, size, generator=random) * size**-0.5).bfloat16(),
        "weights": torch.rand(tokens, 8, generator=random),
        "ids": torch.rand(tokens, E, generator=random).topk(8).indices.int(),
    }
    with on_the_cpu():
        exact = experts(reference, **{name: doubled(x) for name, x in call.items()})
    on_device = {name: x.to(device) for name, x in call.items()}
    result: dict[str, Prepared | str] = {
        "torch_gdn": one_output(partial(experts, torch.ops.gdn, **on_device)),
        "pytorch": one_output(partial(grouped, **on_device)),
    }
    return compared(result, exact, device, repeats=7, calls=8, tokens=tokens)


def experts(ops: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    hidden, _ = ops.moe_gate_up(x, gate_up, ids)
    y: Tensor = ops.moe_down(hidden, down, weights, ids)
    return y


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sorts the pairs of tokens and experts, so that an expert's rows are adjacent. Nothing waits for the host."""
    experts = torch.arange(len(gate_up), device=ids.device)
    pairs = ids.flatten()
    order = pairs.argsort()
    tokens, ends = order // ids.shape[1], (pairs[:, None] == experts).sum(0).cumsum(0).int()
    gate, up = torch._grouped_mm(x[tokens], gate_up.mT, offs=ends).chunk(2, -1)
    y = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None]
    return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, y.float()).to(x.dtype)


def check_packed(device: torch.device, rows: int, size: int = 4096) -> Outcome:
    """Multiplies by a square matrix of 4 bits. Biases are -8 scales, so that both forms have the same numbers."""
    refuse_simulated(device)
    for op in ("_weight_int4pack_mm", "_convert_weight_to_int4pack"):
        need(op, "2.5", device)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, size, generator=random).bfloat16()
    codes = torch.randint(16, (size, size), generator=random, dtype=torch.int32)
    scales = (torch.rand(size, size // GROUP, generator=random) * size**-0.5).bfloat16()
    with on_the_cpu():
        numbers = (codes - 8) * scales.double().repeat_interleave(GROUP, 1)
        exact = x.double() @ numbers.mT
    bytes_of_codes = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    words = torch._convert_weight_to_int4pack(bytes_of_codes.to(device), TILES)
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    packed = [each.to(device) for each in (x, pack(codes, 4), scales, -8 * scales)]
    theirs = partial(torch._weight_int4pack_mm, packed[0], words, GROUP, pairs.to(device))
    result: dict[str, Prepared | str] = {
        "torch_gdn": one_output(partial(torch.ops.gdn.quantized_linear, *packed)),
        "pytorch": one_output(theirs),
    }
    return compared(result, exact, device, repeats=7, calls=24, rows=rows)


def check_tuning(device: torch.device, sizes: tuple[int, int, int, int], tokens: int) -> Outcome:
    """Measures the fastest prefill algorithm as `python -m torch_gdn tune` does, but stores nothing."""
    refuse_simulated(device)
    return Outcome(asdict(tune.measure(sizes, tokens, 1, torch.bfloat16, repeats=3, device=device)))
