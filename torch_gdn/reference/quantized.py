"""The ops on packed weights: codes of 4 and 8 bits, and e4m3 numbers."""

import torch
from torch import Tensor

from torch_gdn.reference.common import compute_dtype

__all__ = ["dequantize", "quantized_linear"]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 128  # rows and columns of e4m3 numbers that share a scale, unless all do or each row has its own


def unpack(weight: Tensor, scales: Tensor, biases: Tensor | None, bits: int, dtype: torch.dtype) -> Tensor:
    """Returns [..., N, K] from codes [..., N, K * bits / 32], or from e4m3 numbers [..., N, K]."""
    if scales.dtype == torch.uint8:  # e2m1 numbers, and exponents of two
        codes = codes_of(weight, 4)
        numbers = torch.tensor(E2M1, device=weight.device, dtype=dtype)[codes]
        powers = scales.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)
        return numbers * spread(powers, 32, dtype)
    if biases is None:
        by_row = along(scales.to(dtype), -2, weight.shape[-2])
        return weight.view(torch.float8_e4m3fn).to(dtype) * along(by_row, -1, weight.shape[-1])
    codes = codes_of(weight, bits).to(dtype)
    group = codes.shape[-1] // scales.shape[-1]
    if biases.dtype == torch.uint8:  # zero points
        return (codes - spread(biases, group, dtype)) * spread(scales, group, dtype)
    return codes * spread(scales, group, dtype) + spread(biases, group, dtype)


def codes_of(weight: Tensor, bits: int) -> Tensor:
    words = weight.view(torch.int32)[..., None] >> torch.arange(0, 32, bits, device=weight.device, dtype=torch.int32)
    return (words & (2**bits - 1)).flatten(-2)


def along(scales: Tensor, dim: int, size: int) -> Tensor:
    """Repeats scales of blocks of rows or columns for each row or column. One scale for all is broadcast."""
    if scales.shape[dim] in (1, size):
        return scales
    return scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


def spread(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).repeat_interleave(group, dim=-1)


def matrix(weight: Tensor, scales: Tensor | None, biases: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the weights of `columns` columns as numbers, whether they are packed or not."""
    if scales is None:
        return weight.to(dtype)
    return unpack(weight, scales, biases, 32 * weight.shape[-1] // columns, dtype)


def quantized_linear(
    x: Tensor, weight: Tensor, scales: Tensor, biases: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Returns x Wᵀ + bias."""
    dtype = compute_dtype(x)
    y = x.to(dtype) @ matrix(weight, scales, biases, x.shape[-1], dtype).mT
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def dequantize(
    weight: Tensor, scales: Tensor, biases: Tensor | None, bits: int, indices: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns the rows of packed weights, or those that `indices` name."""
    computed = compute_dtype(scales) if scales.is_floating_point() else torch.float64
    rows = unpack(weight, scales, biases, bits, computed).to(dtype or scales.dtype)
    return rows if indices is None else rows[indices.long()]
