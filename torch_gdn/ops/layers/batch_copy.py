from __future__ import annotations

import torch
from torch import Tensor


def batch_copy_(pool: Tensor, source_offsets: Tensor, destination_offsets: Tensor, sizes: Tensor) -> None:
    """Copies ranges of bytes within one buffer, in place and in one dispatch.

    An engine moves states with it: prefix caching copies blocks of states of any size, and a window of columns slides
    within its slot. A range may overlap itself. The result is then as if it had been read before it was written.

    vLLM: `batch_memcpy` of `vllm.v1.worker.mamba_utils`, here with offsets into pool instead of addresses.

    Args:
        pool: [bytes], uint8. The bytes of an engine's storage, with a stride of 1, as `torch.empty(0,
            dtype=torch.uint8, device=...).set_(states.untyped_storage())` returns them.
        source_offsets, destination_offsets: [n], int32 or int64. The byte at which each range starts. Any stride, on
            the CPU or on pool's device. No range may write bytes that another one reads or writes; only offsets on the
            CPU are checked for this. Two ranges may read the same bytes.
        sizes: [n], int32 or int64. The number of bytes in each range, which may be 0. Any stride, on the CPU or on
            pool's device. The kernel copies 16 bytes at a time if both offsets are the same distance from a multiple of
            16 in the storage, and 2 bytes at a time if both are odd or both are even.

    Raises:
        ValueError: If a range leaves the pool, or if it writes bytes that another one reads or writes. Nothing is
            copied then.
        RuntimeError: On `mps`, at the next synchronisation, if a range given on the device leaves the pool. That range
            is not copied.

    Example:
        >>> import torch, torch_gdn
        >>> pool = torch.arange(8, dtype=torch.uint8)
        >>> source_offsets, destination_offsets, sizes = torch.tensor([[1, 6], [0, 4], [3, 2]]).unbind()
        >>> torch_gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)
        >>> pool
        tensor([1, 2, 3, 3, 6, 7, 6, 7], dtype=torch.uint8)
    """
    torch.ops.gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)
