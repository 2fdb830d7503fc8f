"""What torch_gdn is compared with: transformers' PyTorch loops on the same device, and MLX where it is installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torch_gdn.check.steps import LeftOut

Call = Callable[[], Any]


def transformers_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The chunked and the recurrent loop, under the decorator that would prefer FLA's kernels."""
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as model
    except ImportError as error:
        raise LeftOut(f"nothing to compare with: {error}; pip install 'transformers>=5.23,<5.24'") from error
    chunk, recurrent = model.torch_chunk_gated_delta_rule, model.torch_recurrent_gated_delta_rule
    return inspect.unwrap(chunk), inspect.unwrap(recurrent)


def mlx_rule(inputs: dict[str, Any], device: torch.device) -> tuple[Call, Callable[[], Tensor]]:
    """A call of MLX's kernel that waits for it, and its output. q and k are normalised before, not in the kernel.

    MLX runs on the GPU of a Mac and on the CPU elsewhere.
    """
    if (device.type == "mps") != (sys.platform == "darwin"):
        raise LeftOut(f"MLX would not run on {device.type} here")
    try:
        import mlx.core as mx
        import numpy as np
    except ImportError as error:
        raise LeftOut(f"{error}; pip install 'mlx>=0.32.4,<0.33'") from error
    if not hasattr(mx.fast, "gated_delta_update"):
        raise LeftOut("this MLX has no mx.fast.gated_delta_update; 0.32.4 has")

    def array(x: Tensor, dtype: Any = mx.bfloat16) -> Any:
        return mx.array(x.float().contiguous().numpy()).astype(dtype)

    q, k = (normalize(inputs[name].float(), dim=-1) for name in ("q", "k"))
    arrays = [array(q * q.size(-1) ** -0.5), array(k), array(inputs["v"]), array(inputs["g"].exp())]
    arrays += [array(inputs["beta"]), array(inputs["initial_state"].transpose(-1, -2), mx.float32)]
    mx.eval(*arrays)

    def call() -> Any:
        results = mx.fast.gated_delta_update(*arrays)
        mx.eval(*results)
        return results

    return call, lambda: torch.from_numpy(np.array(call()[0].astype(mx.float32)))
