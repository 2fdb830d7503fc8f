from __future__ import annotations

import torch
from torch import Tensor


def copy_from_host_(dst: Tensor, src: Tensor) -> None:
    """Copies a small array of the host to the device without waiting for it, in place.

    On `mps`, PyTorch's copy ends the stream's encoder and submits the work so far, and a blocking one waits for the
    GPU. This op puts the numbers into its own command instead, so you may change src as soon as the op returns. PyTorch
    copies arrays of more than 32 KiB, and the host waits.

    Source: `CpuGpuBuffer.copy_to_gpu` in vLLM has this purpose.

    Args:
        dst: [...], any dtype. Contiguous. Written in place.
        src: [...], dst's dtype. dst's shape, with any strides, on the CPU or on dst's device.

    Example:
        >>> import torch, torch_gdn
        >>> lengths = torch.zeros(3, dtype=torch.int32)
        >>> torch_gdn.copy_from_host_(lengths, torch.tensor([7, 1, 12], dtype=torch.int32))
        >>> lengths
        tensor([ 7,  1, 12], dtype=torch.int32)
    """
    torch.ops.gdn.copy_from_host_(dst, src)
