"""Runs what torch_gdn is compared with: transformers' PyTorch loops on the same device, and MLX if installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_gdn_check.steps import Skipped

Call = Callable[[], Any]


class Prepared(NamedTuple):
    call: Call  # the timed call
    output: Callable[[], tuple[Tensor, Tensor]]  # o and the final state; calls only once if possible


def prepared_function(function: Callable[[], Any]) -> Prepared:
    return Prepared(function, function)


def transformers_rule(name: str, inputs: dict[str, Any], model: str = "qwen3_next") -> Prepared:
    """Returns a PyTorch loop of transformers, without the decorator that would prefer FLA's kernels."""
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError as error:
        raise Skipped(f"{error}; pip install 'transformers>=5.23,<5.25'") from error
    renamed = {"q": "query", "k": "key", "v": "value"}
    function = inspect.unwrap(getattr(module, name))
    return prepared_function(partial(function, **{renamed.get(key, key): x for key, x in inputs.items()}))


def mlx_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, device: torch.device
) -> Prepared:
    """Calls MLX's kernel in v's dtype and waits for the result. q and k are normalised before, not in the kernel.

    MLX runs on the GPU of a Mac and on the CPU elsewhere.
    """
    if (device.type == "mps") != (sys.platform == "darwin"):
        raise Skipped(f"MLX would not run on {device.type} here")
    try:
        import mlx.core as mx
        import numpy as np
    except ImportError as error:
        raise Skipped(f"{error}; pip install 'mlx>=0.32.4,<0.33'") from error
    if not hasattr(mx.fast, "gated_delta_update"):
        raise Skipped("this MLX has no mx.fast.gated_delta_update; version 0.32.4 has it")
    dtype = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}[v.dtype]
    scaled = q.float() * q.size(-1) ** -0.5
    arrays: list[Any] = [mx.array(x.float().contiguous().numpy()).astype(dtype) for x in (scaled, k, v, g.exp(), beta)]
    arrays.append(mx.array(initial_state.transpose(-1, -2).contiguous().numpy()))
    mx.eval(*arrays)

    def call() -> Any:
        results = mx.fast.gated_delta_update(*arrays)
        mx.eval(*results)
        return results

    def output() -> tuple[Tensor, Tensor]:
        o, state = (torch.from_numpy(np.array(x.astype(mx.float32))) for x in call())
        return o, state.transpose(-1, -2)

    return Prepared(call, output)
