from __future__ import annotations

from typing import Any

from torch import Tensor


def check_tensor(function: str, name: str, x: Any) -> None:
    """For functions that look at a tensor before the op does."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: {name}: expected a tensor, got {type(x).__name__}")


def check_cu_seqlens(function: str, cu_seqlens: Any) -> None:
    """Refuses a list or an array here, because PyTorch's own message would print every element."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{function}: cu_seqlens: expected a tensor of int32 or int64, got {type(cu_seqlens).__name__}; "
            "torch.tensor(...) makes one"
        )
