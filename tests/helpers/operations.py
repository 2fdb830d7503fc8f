"""Counts the operations that a block runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("view", "_unsafe_view", "expand", "t", "transpose", "slice", "split", "select", "detach", "alias", "unsqueeze")


def launches(name: str, args: Sequence[Any]) -> bool:
    """Returns whether an operation on tensors of mps launches something. Views do not, and a `linear` is one launch."""
    return name not in VIEWS and any(isinstance(x, Tensor) and x.device.type == "mps" for x in args)


class CountedOperations(TorchDispatchMode):
    """Counts by name the operations that `counts` returns True for."""

    def __init__(self, counts: Callable[[str, Sequence[Any]], bool] = launches) -> None:
        super().__init__()
        self.counts = counts
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.counts(name, args):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
