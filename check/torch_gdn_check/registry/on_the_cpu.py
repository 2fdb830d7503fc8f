"""Makes sure that exact answers are computed on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class on_the_cpu(TorchDispatchMode):
    """Raises an error for an operation on another device's tensor inside the block.

    A reference computed on the device would share the faults of the kernels that it judges.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, results)):
            if isinstance(each, Tensor) and each.device.type != "cpu":
                raise RuntimeError(
                    f"{func}: expected a reference to be computed on the CPU, got a tensor on {each.device}"
                )
        return results
