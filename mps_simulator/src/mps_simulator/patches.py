"""Adds the Python parts that PyTorch for Linux lacks for an mps device, and hides CUDA."""

from __future__ import annotations

import os
from typing import Any

import torch


def _patch_storages() -> None:
    """Adds `torch.UntypedStorage(n, device="mps")`, which pickle and deepcopy need. The CPU build has no mps device."""
    original = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, **keywords: Any) -> Any:
        device = keywords.get("device")
        if device is None or torch.device(device).type != "mps":
            return original(cls, *args, **keywords)
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device="mps").untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device="mps").untyped_storage()

    torch.UntypedStorage.__new__ = staticmethod(new)  # type: ignore[method-assign]


def _hide_cuda() -> None:
    """Hides CUDA's GPUs, here and in child processes. pytorch/hooks.cpp hides that PyTorch was built for CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.version.cuda is not None:
        binding: Any = torch._C
        binding._cuda_getDeviceCount = lambda: 0  # CUDA reads the variable once, perhaps before this


def apply(device: Any) -> None:
    binding: Any = torch._C
    binding._has_mps = True  # torch.mps and torch.manual_seed look here
    binding._mps_get_name = lambda: device.device_name
    binding._mps_get_core_count = lambda: device.core_count
    binding._mps_compileShader = device.compile_shader
    for query in vars(torch.backends.mps).values():
        if hasattr(query, "cache_clear"):  # it may hold an older answer
            query.cache_clear()
    _patch_storages()
    _hide_cuda()
