"""Draws tensors for entries, makes views of them, and moves calls to a device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]  # keyword arguments of an op


def unaligned(x: Tensor) -> Tensor:
    """Returns the same values, starting one element into their storage."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    """Returns the same values, with the first two dimensions swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def columns_apart(x: Tensor) -> Tensor:
    """Returns the same values with a last stride that is not 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def doubled(x: Any) -> Any:
    return x.double() if is_floating(x) else x


def tensors_of(call: Call) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, Tensor)]


def whole_storage(x: Tensor) -> Tensor:
    """Returns everything in the tensor's memory, as elements of its dtype."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def to_device(call: Call, device: torch.device | str) -> Call:
    """Copies the call to the device. Tensors keep their strides and gaps, and those that share memory still do."""
    storages: dict[int, Tensor] = {}
    moved: Call = dict(call)
    for name in tensors_of(call):
        x = call[name]
        memory = x.untyped_storage()
        if memory.data_ptr() not in storages or not memory.nbytes():
            storages[memory.data_ptr()] = whole_storage(x).to(device, copy=True)
        whole = storages[memory.data_ptr()].view(x.dtype)
        moved[name] = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    return moved


def empty_on(call: Call, device: torch.device | str) -> Call:
    """Returns the call with uninitialised tensors of the same sizes, strides and alignment, to record it."""
    moved: Call = dict(call)
    for name in tensors_of(call):
        x = call[name]
        size = x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        size = 0 if x.numel() == 0 else size
        storage = torch.empty(size, dtype=x.dtype, device=device)
        moved[name] = storage.as_strided(x.shape, x.stride(), x.storage_offset() if x.numel() else 0)
    return moved


def bytes_of(*tensors: Any) -> int:
    """Returns the bytes of all elements. Arguments that are not tensors take none."""
    return sum(math.prod(x.shape) * x.element_size() for x in tensors if isinstance(x, Tensor))


def slots(pool: Tensor, count: int) -> Call:
    """Draws slots for `count` sequences. If there are several, one has no initial state and another no slot."""
    indices, flags = torch.arange(count).flip(0) + 1, torch.ones(count, dtype=torch.bool)
    if count > 1:
        indices[-1], flags[-2] = -1, False
    return {"state_pool": pool, "state_indices": indices, "has_initial_state": flags}


def boundaries_of(tokens: int, packed: bool, boundaries: tuple[int, ...]) -> list[int] | None:
    """Returns cu_seqlens: the given ones, or those of three sequences, the second of which is empty. Returns None for a
    batch.
    """
    quarter = tokens // 4
    return list(boundaries or ((0, quarter, quarter, tokens) if packed else ())) or None
