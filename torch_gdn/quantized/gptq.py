"""Reads GPTQ files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from torch_gdn.quantized.formats import Format, Stored, refusal
from torch_gdn.quantized.packed_weight import PackedWeight, assemble, checked_words
from torch_gdn.quantized.packing import expect, mask_of, unpack

# The number to add to a stored zero point, by `checkpoint_format`.
OFFSETS = {"gptq": 1, "gptq_v2": 0}
TENSORS = (
    Stored("qweight", columns="word", transposed=True),
    Stored("scales", columns="group", transposed=True),
    Stored("qzeros", rows="word", columns="group", transposed=True),
)


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    checkpoint_format: str = "gptq",
) -> PackedWeight:
    """Makes the packed weight of a layer of a GPTQ file.

    Args:
        qweight: words of codes along K, int32 [..., K * bits / 32, N].
        qzeros: words of zero points along N, int32 [..., K / group, N * bits / 32].
        scales: [..., K / group, N].
        g_idx: the group of each column, [K]. Default: None, the columns are sorted by group.
        bits: 4 or 8.
        checkpoint_format: "gptq", whose zero points are stored less one, or "gptq_v2". Default: "gptq".

    Raises:
        ValueError: what these cannot express: other bits, groups or formats, or shapes that do not fit together.
    """
    words = checked_words("from_gptq", "qweight", qweight, bits)
    formats = ", ".join(OFFSETS)
    expect("from_gptq: checkpoint_format", checkpoint_format in OFFSETS, f"one of {formats}", repr(checkpoint_format))
    *_, groups, N = scales.shape
    expect("from_gptq: scales", words.shape[-1] == N, f"{words.shape[-1]} rows", N)
    stored = checked_words("from_gptq", "qzeros", qzeros, bits)
    expect(
        "from_gptq: qzeros", stored.shape[-2:] == (groups, N * bits // 32), f"{[groups, N * bits // 32]}", qzeros.shape
    )
    zeros = unpack(stored, bits) + OFFSETS[checkpoint_format] & mask_of(bits)
    return assemble("from_gptq", words.mT.contiguous(), scales.mT, zeros.mT, bits, g_idx)


def read(config: Mapping[str, Any]) -> Format:
    """Returns the format of files with this `quantization_config`, or raises what `configuration.read` does."""
    written, bits = config.get("checkpoint_format") or config.get("format") or "gptq", config.get("bits")
    if bits not in (4, 8) or written not in OFFSETS:
        raise refusal(f"GPTQ with {bits} bits in the format {written}")
    convert = partial(from_gptq, checkpoint_format=written)
    act_order = bool(config.get("desc_act")) and not config.get("static_groups")
    return Format("gptq", TENSORS, convert, g_idx="g_idx", act_order=act_order)
