"""Measures what loading a model with packed weights takes: memory, and numbers made of bytes, which it never needs."""

from __future__ import annotations

from collections.abc import Callable
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


def measured(load: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Returns what `load` does, the bytes of mps that are held since, the most that were held meanwhile, and how many
    numbers were made.
    """
    before = torch.mps.current_allocated_memory()
    torch.accelerator.reset_peak_memory_stats()
    with Decoded() as decoded:
        result = load()
    held, most = torch.mps.current_allocated_memory(), torch.accelerator.max_memory_allocated()
    return result, [held - before, most - before, decoded.numbers]
