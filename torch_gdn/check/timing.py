"""Decode and prefill of one layer, timed beside transformers' own PyTorch code on the same device."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn.check.steps import LeftOut, Outcome, on_simulated_device
from torch_gdn.testing.bounds import relative_error

LARGEST_DISTANCE = 1e-2  # of the outputs in bfloat16, whose rounding alone is 2e-3; wrong ones are at 1e-1 and more
Call = Callable[[], tuple[Tensor, Tensor | None]]


def layer_inputs(shape: tuple[int, int, int, int], tokens: int, device: torch.device) -> dict[str, Any]:
    """What a model of these (H, HV, K, V) hands to its gated delta rule, in bfloat16, from a state."""
    H, HV, K, V = shape
    random = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random)

    tensors = {
        "q": draw(1, tokens, H, K).bfloat16(),
        "k": draw(1, tokens, H, K).bfloat16(),
        "v": draw(1, tokens, HV, V).bfloat16(),
        "g": torch.nn.functional.logsigmoid(draw(1, tokens, HV)),
        "beta": draw(1, tokens, HV).sigmoid(),
        "initial_state": draw(1, HV, K, V),
    }
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return {name: x.to(device) for name, x in tensors.items()} | options


def transformers_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The chunked and the recurrent loop, under the decorator that would prefer FLA's kernels."""
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as model
    except ImportError as error:
        raise LeftOut(f"nothing to compare with: {error}; pip install 'transformers>=5.23,<5.24'") from error
    chunk, recurrent = model.torch_chunk_gated_delta_rule, model.torch_recurrent_gated_delta_rule
    return inspect.unwrap(chunk), inspect.unwrap(recurrent)


def median_seconds(call: Call, device: torch.device, repeats: int, calls: int) -> float:
    """Of one call; `calls` of them are encoded before the device is waited for, as a model's layers are."""

    def wait() -> None:
        if device.type == "mps":
            torch.mps.synchronize()

    call()  # compiles
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def check_timing(
    device: torch.device, shape: tuple[int, int, int, int], tokens: int, repeats: int, calls: int
) -> Outcome:
    """Both medians and their ratio; the outputs must agree, or the times compare different things."""
    if on_simulated_device() and device.type == "mps":
        raise LeftOut("the times of the simulated device say nothing of a Mac")
    chunk, recurrent = transformers_functions()
    inputs = layer_inputs(shape, tokens, device)
    positional = {"query": inputs.pop("q"), "key": inputs.pop("k"), "value": inputs.pop("v")}
    ours = torch_gdn.fused_recurrent_gated_delta_rule if tokens == 1 else torch_gdn.chunk_gated_delta_rule
    theirs = recurrent if tokens == 1 else chunk
    ours_call: Call = partial(ours, *positional.values(), **inputs)
    theirs_call: Call = partial(theirs, **positional, **inputs)
    distance = relative_error(ours_call()[0].float().cpu(), theirs_call()[0].float().cpu())
    seconds = median_seconds(ours_call, device, repeats, calls)
    fallback = median_seconds(theirs_call, device, repeats, calls)
    figures = {
        "seconds": seconds,
        "fallback_seconds": fallback,
        "ratio": fallback / seconds,
        "distance": distance,
        "tokens": tokens,
    }
    if not distance <= LARGEST_DISTANCE:  # nan is not
        return Outcome(figures, f"the outputs are {distance:.3g} apart, at most {LARGEST_DISTANCE} expected")
    return Outcome(figures)
