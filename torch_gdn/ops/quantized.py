"""Weights of packed groups."""

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import QuantizedLinear

__all__ = ["dequantize", "quantized_linear"]


def quantized_linear(
    x: Tensor, weight: Tensor, scales: Tensor, biases: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Multiplies x with packed weights of 4 or 8 bits: y = x Wᵀ + bias.

    Row n of W is `scales[n, k // group] * code[n, k] + biases[n, k // group]`. Code k of a row has the bits from
    `k % per * bits` on of word `k // per`, where a word holds `per = 32 / bits` codes. This is MLX's layout, of which
    `.view(torch.int32)` makes int32. Bits and group follow from the shapes.

    Without biases, weights are numbers of 8 bits, e4m3: row n of W is `scales[n // rows, k // group] * number[n, k]`.
    A tensor of torch.float8_e4m3fn has them, of which `.view(torch.uint8)` makes bytes. A scale belongs to blocks of
    128 x 128, of which the last ones may be smaller, or to one row or all, and to all columns.

    With scales of uint8, weights are MXFP4: code k of 4 bits is an e2m1 number, and a scale is e8m0,
    `2**(scales[n, k // 32] - 127)`. 255 is NaN.

    Sums are float32, and y is rounded once. On `mps` up to 8 rows of x read each weight
    once; more rows read it once per 32 rows. Only x has a gradient, which multiplies by the weights as `dequantize`
    returns them in x's dtype.

    Args:
        x: [..., K], bfloat16, float16 or float32. Copied if its rows do not start at multiples of 4 elements.
        weight: [N, W], int32 or uint8. W is K / 8 for 4-bit codes, K / 4 for 8-bit codes, and K for uint8, which is
            e4m3. The last stride must be 1.
        scales: [R, G], bfloat16, float16, float32 or uint8. For codes R is N and G is K / group, and a group has 32, 64
            or 128 codes. MXFP4 has uint8, and G of K / 32. For e4m3 R is ceil(N / 128), N or 1, and G is ceil(K / 128)
            or 1. The last stride must be 1.
        biases: [R, G], float32 if scales are float32, else scales' dtype or uint8. uint8 are zero points z, which stand
            for the biases -z * scales. None for e4m3 and MXFP4. The last stride must be 1.
        bias: [N], bfloat16, float16 or float32. Added to each row of y. Default: None.

    Returns:
        y: [..., N], x's dtype.

    Example:
        >>> import torch, torch_gdn
        >>> weight = torch.full((1, 4), 0x22222222, dtype=torch.int32)  # 32 codes of 4 bits, each 2
        >>> scales, biases = torch.tensor([[0.5]]), torch.tensor([[-4.0]])
        >>> torch_gdn.quantized_linear(torch.ones(1, 32), weight, scales, biases)
        tensor([[-96.]])
    """
    multiply = QuantizedLinear.apply if needs_grad(x) else torch.ops.gdn.quantized_linear
    return multiply(x, weight, scales, biases, bias)


def dequantize(
    weight: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    bits: int,
    indices: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns packed weights as numbers: all rows, or the rows that `indices` name, as an embedding looks them up.

    `quantized_linear` describes how weights are packed. A number is rounded once, to the result's dtype.

    Args:
        weight: [N, W], int32 or uint8. W is K * bits / 32, and K for uint8, which is e4m3. The last stride must be 1.
        scales: [R, G], bfloat16, float16, float32 or uint8. See `quantized_linear`. The last stride must be 1.
        biases: [R, G], float32 if scales are float32, else scales' dtype or uint8. None for e4m3 and MXFP4. See
            `quantized_linear`. The last stride must be 1.
        bits: 4 or 8. 8 for e4m3, 4 for MXFP4.
        indices: any shape, int32 or int64. Rows from 0 to N - 1. Default: all rows in their order.
        dtype: bfloat16, float16 or float32. Default: scales' dtype, which MXFP4 cannot have.

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
