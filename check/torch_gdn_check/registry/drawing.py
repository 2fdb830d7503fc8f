"""Draws the same tensors in any process: in float32 unless a dtype is given, and with random numbers of its own."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm}
FLOATING = {torch.rand, torch.randn, torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace, torch.logspace}
BY_VALUE = {torch.tensor, torch.full, torch.arange}  # integers give an integer tensor


_generator: ContextVar[torch.Generator] = ContextVar("_generator", default=torch.default_generator)


def seed_of_draw() -> int:
    """Returns the seed of the innermost `drawing`, or else the process's."""
    return _generator.get().initial_seed()


class drawing(TorchFunctionMode):
    """Makes tensors as in a process whose default dtype is float32, after torch.manual_seed(seed).

    It applies to the calling thread. torch.set_default_dtype and torch.manual_seed apply to the process, where another
    thread may be building a model, and the latter to `mps` too.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __enter__(self) -> drawing:
        self.outer = _generator.set(self.generator)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _generator.reset(self.outer)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.randn_like:  # takes no generator
            return torch.empty_like(*args, **options).normal_(generator=self.generator)
        if func in RANDOM and options.get("generator") is None:
            options["generator"] = self.generator
        is_floating = func in FLOATING or (func in BY_VALUE and any(isinstance(x, float) for x in tree_leaves(args)))
        if is_floating and options.get("dtype") is None:
            options["dtype"] = torch.float32
        return func(*args, **options)
