"""Makes mps tensors without memory, to record calls at no cost and where PyTorch cannot allocate (a virtual Mac)."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class fake_mps(TorchDispatchMode):
    """Gives tensors made inside the block a device, sizes and strides. torch_gdn's ops run their host code on them.

    Use it within `torch_gdn.recording`: a kernel cannot be launched on such tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._fake:
            if func.namespace == "gdn":  # its kernel for mps, not its shapes for Meta
                return func._op_dk(torch._C.DispatchKey.MPS, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))
