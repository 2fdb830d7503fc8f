from __future__ import annotations

import torch
from torch import Tensor


def dequantize(
    weight: Tensor,
    scales: Tensor,
    biases: Tensor,
    bits: int,
    indices: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns packed weights as numbers: all rows, or the rows that `indices` name, as an embedding looks them up.

    `quantized_linear` describes how weights are packed. A number is rounded once, to the result's dtype.

    Args:
        weight: [N, W], int32. W is K * bits / 32. The last stride must be 1.
        scales: [N, G], bfloat16, float16 or float32. G is K / group, and a group has 32, 64 or 128 codes. The last
            stride must be 1.
        biases: [N, G], float32 if scales are float32, else scales' dtype or uint8. See `quantized_linear`. The
            last stride must be 1.
        bits: 4 or 8.
        indices: any shape, int32 or int64. Rows from 0 to N - 1. Default: all rows in their order.
        dtype: bfloat16, float16 or float32. Default: scales' dtype.

    Returns:
        rows: [..., K], dtype, or scales' dtype. [N, K], or indices' shape followed by K.

    Raises:
        RuntimeError: On `mps`, at the next synchronisation, if an index is wrong. Its row is zeros.

    Example:
        >>> import torch, torch_gdn
        >>> weight = torch.full((2, 4), 0x22222222, dtype=torch.int32)  # 32 codes of 4 bits a row, each 2
        >>> scales, biases = torch.tensor([[0.5], [1.0]]), torch.tensor([[-4.0], [0.0]])
        >>> torch_gdn.dequantize(weight, scales, biases, 4, indices=torch.tensor([1, 0]))[:, 0]
        tensor([ 2., -3.])
    """
    return torch.ops.gdn.dequantize(weight, scales, biases, bits, indices, dtype)
