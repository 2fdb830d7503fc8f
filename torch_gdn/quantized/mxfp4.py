"""Reads MXFP4: e2m1 numbers of 4 bits, of which 32 columns share an e8m0 scale, a power of two.

compressed-tensors writes it as "mxfp4-pack-quantized", and MLX in the mode "mxfp4".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_gdn.quantized.formats import Format, Packing, Sizes, Stored
from torch_gdn.quantized.packed_weight import PackedWeight
from torch_gdn.quantized.packing import expect

COLUMNS = 32  # that share a scale


def from_mxfp4(weight: Tensor, scales: Tensor) -> PackedWeight:
    """Makes the packed weight of a layer: a view.

    Args:
        weight: numbers in the order of columns, the first in the lowest bits: uint8 [..., N, K / 2], or int32 or uint32
            [..., N, K / 8].
        scales: exponents uint8 [..., N, K / 32]. A scale is 2^(exponent - 127).

    Raises:
        ValueError: other dtypes, or shapes that do not fit together.
    """
    dtypes = (torch.uint8, torch.int32, torch.uint32)
    expect("from_mxfp4: weight", weight.dtype in dtypes, "uint8, int32 or uint32", weight.dtype)
    expect("from_mxfp4: scales", scales.dtype == torch.uint8, "uint8", scales.dtype)
    size = weight.shape[-1] * weight.element_size()
    expect("from_mxfp4: weight", size % (COLUMNS // 2) == 0, f"rows of a multiple of {COLUMNS} numbers", 2 * size)
    return PackedWeight(weight.contiguous().view(torch.int32), scales.contiguous(), None, 4)


def as_words(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Returns a matrix's tensor as engines hold it: bytes of numbers become words."""
    return tensor.contiguous().view(torch.int32) if name == "weight_packed" else tensor


def convert(bits: int, weight_packed: Tensor, weight_scale: Tensor) -> PackedWeight:
    return from_mxfp4(weight_packed, weight_scale)


@dataclass(frozen=True)
class Mxfp4(Format):
    """The files have MXFP4, or codes with biases."""

    def packing(self, name: str, shapes: Mapping[str, Sizes], columns: int, rows: int | None = None) -> Packing:
        """Reads the shapes as `Format.packing` does."""
        self.expect_tensors(name, shapes)
        codes, scales, *biases = self.tensors
        if any(each.name in shapes for each in biases):
            return super().packing(name, shapes, columns, rows)
        words = shapes[codes.name]
        if self.translate:
            words = (*words[:-1], words[-1] // 4)
        packing = super().packing(name, {**shapes, codes.name: words}, columns, rows)
        if (packing.bits, packing.group_size) != (4, COLUMNS):
            got = f"{packing.bits} bits in groups of {packing.group_size}"
            raise ValueError(f"{name}: expected MXFP4 of 4 bits in groups of {COLUMNS}, got {got}")
        return replace(packing, tensors=(codes, scales._replace(is_exponent=True)), is_mxfp4=True)


COMPRESSED = Mxfp4(
    "compressed-tensors",
    (Stored("weight_packed", columns="word"), Stored("weight_scale", columns="group")),
    convert,
    translate=as_words,
)
