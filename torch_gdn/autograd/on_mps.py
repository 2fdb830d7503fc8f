"""The backward ops on `mps`: the references' formulas in float32, with PyTorch's own kernels, chunk by chunk.

They give right gradients in O(T) memory, but take some 60 launches a chunk, and read cu_seqlens on the host.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from torch_gdn import _C, reference

LIBRARY = torch.library.Library("gdn", "IMPL")


def check_boundaries(op: str, boundaries: list[int], tokens: int) -> None:
    """Checks the values, which the contract reads only when a kernel of its own runs."""
    if boundaries != sorted(boundaries) or boundaries[0] != 0 or boundaries[-1] != tokens:
        raise ValueError(
            f"{op}: cu_seqlens: expected ascending boundaries from 0 to T = {tokens}, got {boundaries[:8]} ..."
        )


def register(op: str) -> None:
    function = getattr(reference, op)
    signature = inspect.signature(function)

    required = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]

    def run(*args: Any) -> tuple[Tensor, ...]:
        for name, x in zip(required, args, strict=False):
            if x is None:
                raise TypeError(f"{op}: {name}: expected a tensor, got None")
        call = signature.bind(*args).arguments
        boundaries, is_recorded = call.get("cu_seqlens"), _C.is_recording()  # recorded tensors may have no memory
        if boundaries is not None and boundaries.shape == (1,) and not is_recorded:  # no sequence, so no shape fits
            check_boundaries(op, boundaries.tolist(), call["q"].shape[1])
        outputs: tuple[Tensor, ...] = _C.infer_outputs(op, *args)  # checks the call
        if is_recorded:
            return outputs
        if boundaries is not None:
            check_boundaries(op, boundaries.tolist(), call["q"].shape[1])
        for out, found in zip(outputs, function(*args), strict=True):
            if found is not None:
                out.copy_(found)
        return outputs

    LIBRARY.impl(op, run, "MPS")


for _op in reference.gradients.__all__:
    register(_op)
