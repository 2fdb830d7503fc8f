"""Reads weights that are numbers, and not codes.

FP8 has torch.float8_e4m3fn: Qwen's "fp8", ModelOpt's FP8, compressed-tensors' "float-quantized". A scale multiplies a
block of 128 x 128 weights, a row, or the whole matrix. The last blocks of a matrix may be smaller.

MXFP4 has e2m1 numbers of 4 bits, of which 32 columns share an e8m0 scale, a power of two. compressed-tensors writes it
as "mxfp4-pack-quantized", and MLX in the mode "mxfp4".
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn.quantized.formats import Format, OtherFormat, Packing, Sizes, Stored, refusal
from torch_gdn.quantized.packed_weight import PackedWeight, expect, scales_of_rows
from torch_gdn.reference.quantized import BLOCK

SCALES = (torch.float32, torch.bfloat16, torch.float16)
# Names of tensors that quantise activations, or a key-value cache, which stay as they are.
ACTIVATIONS = ("input_scale", "activation_scale", "k_scale", "v_scale")


def from_float8(weight: Tensor, weight_scale: Tensor) -> PackedWeight:
    """Makes the packed weight of a layer: a view of its bytes, and its scales.

    Args:
        weight: float8_e4m3fn, or its bytes in uint8, [..., N, K].
        weight_scale: what a weight is multiplied by: [..., ceil(N / 128), ceil(K / 128)] for blocks, [..., N, 1] or [N]
            for rows, [] or [1] for all. Other dtypes than float32, bfloat16 and float16 become float32.

    Raises:
        ValueError: other dtypes, or shapes that do not fit together.
    """
    dtypes = (torch.float8_e4m3fn, torch.uint8)
    expect("from_float8: weight", weight.dtype in dtypes, "float8_e4m3fn or uint8", weight.dtype)
    scales = weight_scale if weight_scale.dtype in SCALES else weight_scale.float()
    if scales.numel() == 1:
        scales = scales.reshape([1] * weight.dim())
    elif scales.dim() == 1:
        scales = scales[:, None]
    return PackedWeight(weight.contiguous().view(torch.uint8), scales.contiguous(), None, 8).in_blocks()


def convert_float8(scale: str, bits: int, **tensors: Any) -> PackedWeight:
    """Calls `from_float8` with the tensors of a file. `scale` is the name of the scales, and activations stay."""
    return from_float8(tensors["weight"], tensors[scale])


def by_row(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Returns a matrix's tensor as engines hold it, to put layers together: bytes, or scales [rows, groups]."""
    if name == "weight":
        expect("weight", tensor.dtype == torch.float8_e4m3fn, "float8_e4m3fn", tensor.dtype)
        return tensor.view(torch.uint8)
    scales = tensor.reshape(1, 1) if tensor.numel() == 1 else tensor[:, None] if tensor.dim() == 1 else tensor
    fits = scales.shape[0] in (1, rows, -(-rows // BLOCK))
    expect(name, fits, f"scales of {rows} rows, or of their blocks of {BLOCK}", list(tensor.shape))
    return scales_of_rows(scales, rows)


class Float8(Format):
    def packing(self, name: str, shapes: Mapping[str, Sizes], columns: int, rows: int | None = None) -> Packing:
        weight, scale = self.tensors
        self.expect_tensors(name, shapes)
        result, scales = shapes[weight.name][-2:], shapes[scale.name]
        expected = (rows or result[0], columns)
        expect(f"{name}: {weight.name}", result == expected, f"{list(expected)}", list(result))
        blocks = tuple(-(-size // BLOCK) for size in expected)
        fitting = ((), (1,), expected[:1], (expected[0], 1), (1, 1), blocks)
        known = f"a scale for each {BLOCK} x {BLOCK} weights, {list(blocks)}, for each row, or for all"
        expect(f"{name}: {scale.name}", scales[-2:] in fitting, known, list(scales))
        has_columns = len(scales) > 1 and scales[-1] == blocks[1]
        return Packing(8, BLOCK if has_columns else columns, self.tensors, is_e4m3=True)


def float8(method: str, scale: str, left_out: str = "") -> Format:
    """Returns the format of files whose scales have the name `scale`."""
    stored = (Stored("weight", is_e4m3=True), Stored(scale, columns="group"))
    make = partial(convert_float8, scale)
    return Float8(method, stored, make, ignored=ACTIVATIONS, translate=by_row, left_out=left_out)


def read_fp8(config: Mapping[str, Any]) -> Format:
    kind, block = config.get("fmt") or "e4m3", list(config.get("weight_block_size") or [])
    if kind != "e4m3" or block != [BLOCK, BLOCK]:
        raise refusal(f"fp8 of {kind} with weight_block_size {block or None}", OtherFormat)
    return float8("fp8", "weight_scale_inv", f"{config.get('activation_scheme') or 'dynamic'} activations in FP8")


def read_modelopt(config: Mapping[str, Any]) -> Format:
    algorithm = config.get("quant_algo")
    cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    if algorithm != "FP8" or cache:
        raise refusal(f"ModelOpt's {algorithm}{' with a quantised key-value cache' if cache else ''}", OtherFormat)
    return float8("modelopt", "weight_scale", "static activations in FP8")


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------

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


def convert_mxfp4(bits: int, weight_packed: Tensor, weight_scale: Tensor) -> PackedWeight:
    return from_mxfp4(weight_packed, weight_scale)


class Mxfp4(Format):
    """The files have MXFP4, or codes with biases."""

    def packing(self, name: str, shapes: Mapping[str, Sizes], columns: int, rows: int | None = None) -> Packing:
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


COMPRESSED_MXFP4 = Mxfp4(
    "compressed-tensors",
    (Stored("weight_packed", columns="word"), Stored("weight_scale", columns="group")),
    convert_mxfp4,
    translate=as_words,
)
