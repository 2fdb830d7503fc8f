"""Counts the numbers that operators make of packed weights, which are never needed to load a model."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKED = (torch.uint8, torch.float8_e4m3fn)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Decoded(TorchDispatchMode):
    """While it is entered, adds up in `numbers` the elements of floating-point results that are computed from bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.view.dtype and any(x.dtype in PACKED for x in tensors_in((args, kwargs))):
            made = [x for x in tensors_in(result) if x.is_floating_point() and x.dtype not in PACKED]
            self.numbers += sum(x.numel() for x in made)
        return result
