from __future__ import annotations

import torch
from torch import Tensor


def batch_copy_(pool: Tensor, source_offsets: Tensor, destination_offsets: Tensor, sizes: Tensor) -> None:
    """Copies ranges of bytes within one buffer, in place and in one dispatch: the states that an engine moves.

    For prefix caching, which copies blocks of states of any size, and for a window of columns that slides within its
    slot: a range may overlap itself, and is then as if it had been read before it was written. vLLM: `batch_memcpy` of
    `vllm.v1.worker.mamba_utils`, with offsets into its storage for addresses.

    Args:
        pool: [bytes] uint8, a stride of 1: the bytes of an engine's storage, as
            `torch.empty(0, dtype=torch.uint8, device=...).set_(states.untyped_storage())` gives.
        source_offsets, destination_offsets: [n] int32 or int64, any stride, on the CPU or on pool's device: where each
            range starts, in bytes. No range may write what another one reads or writes, which is checked on the CPU
            alone; two may read the same.
        sizes: [n] int32 or int64, the same: the bytes of each range. 0 is no copy. States are copied 16 bytes at a time
            where both offsets are equally far from a multiple of 16 (of the storage), 2 where both are odd or even.

    Returns:
        None.

    Raises:
        ValueError: a shape, stride or device that is not as above; a range outside the pool, or one that writes what
            another one reads or writes. Then nothing is copied.
        TypeError: a dtype that is not as above.
        RuntimeError: on `mps`, at the next synchronisation, a range on the device that is outside the pool. It is not
            copied.

    Example:
        >>> import torch, torch_gdn
        >>> pool = torch.arange(8, dtype=torch.uint8)
        >>> source_offsets, destination_offsets, sizes = torch.tensor([[1, 6], [0, 4], [3, 2]]).unbind()
        >>> torch_gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)
        >>> pool
        tensor([1, 2, 3, 3, 6, 7, 6, 7], dtype=torch.uint8)
    """
    torch.ops.gdn.batch_copy_(pool, source_offsets, destination_offsets, sizes)
