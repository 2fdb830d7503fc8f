"""Adds the Python parts that PyTorch for Linux lacks for an mps device, and hides CUDA."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
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


def _let_autograd_finish() -> None:
    """Waits until autograd's thread of the device has dropped the last backward, which holds a Python object, the
    "context" of torch/autograd/graph.py. If the thread asks for the GIL in a destructor while Python ends, Python ends
    the thread, and that ends the process: "terminate called without an active exception".
    """
    if any(comm.read_text().startswith("pt_autograd") for comm in Path("/proc/self/task").glob("*/comm")):
        # The thread drops a backward before it takes the next one. This one has no Python object.
        leaf = _KEPT.setdefault("leaf", torch.empty((), device="mps", requires_grad=True))
        gradient = torch.empty((), device="mps")
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward((leaf,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_KEPT: dict[str, torch.Tensor] = {}  # the thread must not be the last to hold a tensor of Python's


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
    atexit.register(_let_autograd_finish)
