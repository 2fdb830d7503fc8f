"""Checks of arguments before an op sees them, among them FLA's that are deprecated there or have no use here."""

import warnings
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


def layout_of_states(function: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Returns state_v_first, which has an old name too."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(
            f"{function}: transpose_state_layout: expected None when state_v_first is set (its new name), "
            f"got {transpose_state_layout}"
        )
    warnings.warn(
        f"{function}: transpose_state_layout is deprecated; use state_v_first", DeprecationWarning, stacklevel=3
    )
    return transpose_state_layout


def refuse_head_first(function: str, head_first: bool | None) -> None:
    if head_first is None:
        return
    if head_first:
        raise ValueError(f"{function}: head_first: expected False (tensors are [B, T, H, ...]), got True")
    warnings.warn(f"{function}: head_first is deprecated and has no effect", DeprecationWarning, stacklevel=3)


def refuse_context_parallelism(function: str, cp_context: Any) -> None:
    if cp_context is not None:
        raise ValueError(f"{function}: cp_context: expected None (one device), got {type(cp_context).__name__}")


def check_cu_seqlens_cpu(function: str, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """Checks an argument that FLA needs and torch_gdn does not: the kernels read cu_seqlens itself."""
    if cu_seqlens_cpu is None:
        return
    if cu_seqlens is None:
        raise ValueError(f"{function}: cu_seqlens_cpu: expected None when cu_seqlens is None, got a tensor")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"{function}: cu_seqlens_cpu: expected a copy of cu_seqlens {tuple(cu_seqlens.shape)}, "
            f"got {tuple(cu_seqlens_cpu.shape)}"
        )
