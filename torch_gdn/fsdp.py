"""FSDP2 on `mps`: after importing this module, `torch.distributed.fsdp.fully_shard` runs there.

>>> import torch_gdn.fsdp
>>> from torch.distributed.fsdp import fully_shard

It adds what PyTorch lacks, unless PyTorch has it: kernels of FSDP's ops, which are PyTorch's own functions, streams, of
which `mps` has one, and the collectives of torch_gdn.distributed. FSDP frees a gathered parameter by
`UntypedStorage.resize_`, which PyTorch refuses on `mps`. So gathered parameters stay in memory; gradients and the
optimizer's state are divided.
"""

import contextlib
from typing import Any

import torch
import torch.distributed.fsdp  # defines its ops
from torch import Tensor

import torch_gdn.distributed  # registers the back end

TESTED = "2.13"  # the PyTorch whose private functions are used


class Stream:
    """The one stream of `mps`, which runs everything in order."""

    def __init__(self, priority: int = 0):
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or torch.mps.event.Event()


def register() -> torch.library.Library | None:
    try:
        if torch._C._dispatch_has_kernel_for_dispatch_key("fsdp::chunk_cat", "MPS"):
            return None
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

        functions = {
            "all_gather_copy_in": _fsdp_collectives.all_gather_copy_in_cuda,
            "split_with_sizes_copy": _fsdp_collectives.split_with_sizes_copy,
            "chunk_cat": _fsdp_collectives.chunk_cat,
        }
        free = _fsdp_param.free_storage
    except (ImportError, AttributeError, RuntimeError) as error:
        got = f"{torch.__version__}: {error}"
        raise ImportError(f"torch_gdn.fsdp: expected the FSDP of PyTorch {TESTED}, got that of {got}") from error
    torch_gdn.distributed.complete_torch_mps(Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext)

    def free_storage(tensor: Tensor) -> None:
        if tensor.device.type != "mps":
            free(tensor)

    _fsdp_param.free_storage = free_storage
    kernels = torch.library.Library("fsdp", "IMPL", "MPS")
    for name, kernel in functions.items():
        kernels.impl(name, kernel)
    return kernels


_KERNELS = register()
