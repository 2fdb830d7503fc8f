"""Reads AWQ files of the GEMM layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn.quantized import gptq
from torch_gdn.quantized.formats import Format, Stored, refusal
from torch_gdn.quantized.packed_weight import PackedWeight, assemble, checked_words
from torch_gdn.quantized.packing import blocks, expect, pack, unpack

# The codes of rows 0, 1, 2, ... of eight are at these places of a word.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int = 4) -> PackedWeight:
    """Makes the packed weight of a layer of an AWQ file.

    Args:
        qweight: words of codes along N, eight to a word and interleaved, int32 [..., K, N / 8].
        qzeros: words of zero points, packed the same way, int32 [..., K / group, N / 8].
        scales: [..., K / group, N].
        bits: 4. Default: 4.

    Raises:
        ValueError: other bits or groups, or shapes that do not fit together.
    """
    expect("from_awq: bits", bits == 4, "4", bits)
    words = checked_words("from_awq", "qweight", qweight, bits)
    stored = checked_words("from_awq", "qzeros", qzeros, bits)
    *_, K, row_words = words.shape
    groups, N = scales.shape[-2:]
    expect("from_awq: scales", 8 * row_words == N, f"{8 * row_words} rows", N)
    expect("from_awq: qzeros", stored.shape[-2:] == (groups, row_words), f"{[groups, row_words]}", list(stored.shape))
    expect("from_awq: qweight", K % 8 == 0, "a multiple of 8 columns", K)
    return assemble("from_awq", packed_along_columns(words), scales.mT, in_order(stored).mT, bits)


def packed_along_columns(words: Tensor) -> Tensor:
    """Converts [..., K, N / 8] words of an AWQ file to [..., N, K / 8] words with the columns in order."""
    *experts, K, row_words = words.shape
    N = 8 * row_words
    weight = torch.empty(*experts, N, K // 8, dtype=torch.int32, device=words.device)
    for rows in blocks(N, multiple=8):
        weight[..., rows, :] = pack(in_order(words[..., rows.start // 8 : rows.stop // 8]).mT, 4)
    return weight


def as_gptq_v2(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Returns a tensor of an AWQ file, of this name and of a matrix with these rows, as files of gptq_v2 have it."""
    if name == "qweight":
        return packed_along_columns(tensor).mT
    return pack(in_order(tensor), 4) if name == "qzeros" else tensor


def in_order(words: Tensor) -> Tensor:
    """Converts [..., N / 8] words to [..., N] codes."""
    codes = unpack(words, 4).unflatten(-1, (-1, 8))
    return torch.stack([codes[..., place] for place in PLACES], dim=-1).flatten(-2)


FORMAT = Format(
    "awq",
    (
        Stored("qweight", rows="word", transposed=True),
        Stored("scales", columns="group", transposed=True),
        Stored("qzeros", rows="word", columns="group", transposed=True),
    ),
    from_awq,
    held_as=Format("gptq", gptq.TENSORS, partial(gptq.from_gptq, checkpoint_format="gptq_v2")),
    translate=as_gptq_v2,
)


def read(config: Mapping[str, Any]) -> Format:
    """Returns the format of files with this `quantization_config`, or raises what `configuration.read` does."""
    bits, zero_point = config.get("bits", config.get("w_bit")), config.get("zero_point", True)
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    if bits != 4 or version != "gemm" or not zero_point:
        raise refusal(f"AWQ with {bits} bits in version {version} with zero_point {zero_point}")
    return FORMAT
