from __future__ import annotations

import torch
from torch import Tensor


def act_and_mul(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Multiplies up by the activated gate, element by element: silu(gate) * up, or sigmoid(gate) * up.

    vLLM: `silu_and_mul`; FLA: `swiglu`. Computed in float32 and rounded once. On `mps` this is one launch.

    Args:
        gate: [..., D], bfloat16, float16 or float32. Any strides, so that gate and up can be halves of one projection.
            Copied if its last stride is not 1, or if it has more than 4 dimensions and is not contiguous.
        up: gate's shape and dtype. Any strides; copied as gate is.
        activation: "silu", "swish" (the same) or "sigmoid". Default: "silu".

    Returns:
        y: gate's shape and dtype. Contiguous.

    Raises:
        ValueError: If the shapes differ, if there is no dimension, or if the activation is not as above.

    Example:
        >>> import torch, torch_gdn
        >>> torch_gdn.act_and_mul(torch.tensor([0.0, 4.0]), torch.tensor([3.0, 1.0]))
        tensor([0.0000, 3.9281])
    """
    y: Tensor = torch.ops.gdn.act_and_mul(gate, up, activation)
    return y
