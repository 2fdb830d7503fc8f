"""Counts the operations on tensors of mps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("view", "_unsafe_view", "expand", "t", "transpose", "slice", "split", "select", "detach", "alias", "unsqueeze")


class CountedOperations(TorchDispatchMode):
    """Counts operations by name, without views, which launch nothing. A `linear` is one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS and any(isinstance(x, Tensor) and x.device.type == "mps" for x in args):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
