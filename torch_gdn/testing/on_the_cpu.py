"""Where exact answers are computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class on_the_cpu(TorchDispatchMode):
    """Inside, an operation on a tensor of another device is an error.

    A reference that the device computed would share the faults of what it is to judge.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, results)):
            if isinstance(each, Tensor) and each.device.type != "cpu":
                raise RuntimeError(
                    f"{func}: expected a reference to be computed on the CPU, got a tensor on {each.device}"
                )
        return results
