"""Reads files of compressed-tensors (llm-compressor's) in the format "pack-quantized"."""

from __future__ import annotations

from torch import Tensor

from torch_gdn.quantized.packed_weight import PackedWeight, assemble, checked_words
from torch_gdn.quantized.packing import expect, unpack


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int,
) -> PackedWeight:
    """Makes the packed weight of a layer.

    A scale for a whole row is repeated for groups of the largest size that divides the row.

    Args:
        weight_packed: words of codes along K, each half the codes more than what it stands for,
            int32 [..., N, K * bits / 32].
        weight_scale: [..., N, K / group], or [..., N, 1].
        weight_zero_point: words of zero points along N, int32 [..., N * bits / 32, K / group]. Default: None.
        weight_g_idx: the group of each column, [K]. Default: None, the columns are sorted by group.
        bits: 4 or 8.

    Raises:
        ValueError: other bits or groups, or shapes that do not fit together.
    """
    name = "from_compressed_tensors"
    words = checked_words(name, "weight_packed", weight_packed, bits)
    *experts, N, groups = weight_scale.shape
    expect(f"{name}: weight_scale", words.shape[-2] == N, f"{words.shape[-2]} rows", N)
    zeros = None
    if weight_zero_point is not None:
        stored = checked_words(name, "weight_zero_point", weight_zero_point, bits)
        shape = [*experts, -(-N * bits // 32), groups]
        expect(f"{name}: weight_zero_point", list(stored.shape) == shape, f"{shape}", list(stored.shape))
        zeros = unpack(stored.mT, bits).mT[..., :N, :]
    return assemble(name, words, weight_scale, zeros, bits, weight_g_idx)
