from __future__ import annotations

from typing import Any

from torch import Tensor


def check_cu_seqlens(function: str, cu_seqlens: Any) -> None:
    """Refuses a list or an array here, because PyTorch's own message would print every element."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{function}: cu_seqlens: expected a tensor of int32 or int64, got {type(cu_seqlens).__name__}; "
            "torch.tensor(...) makes one"
        )
