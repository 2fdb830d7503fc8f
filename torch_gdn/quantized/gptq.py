"""Reads GPTQ files, and AutoRound's, which have the same tensors."""

from __future__ import annotations

from torch import Tensor

from torch_gdn.quantized.awq import from_awq
from torch_gdn.quantized.packed_weight import PackedWeight, assemble, checked_words
from torch_gdn.quantized.packing import expect, mask_of, unpack

# The number to add to a stored zero point, by `checkpoint_format`.
OFFSETS = {"gptq": 1, "gptq_v2": 0}
# These packing formats of AutoRound's hold GPTQ's tensors, which have this `checkpoint_format`.
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}


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


def from_auto_round(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    packing_format: str,
) -> PackedWeight:
    """Makes the packed weight of a layer of an AutoRound file.

    Args:
        qweight: as in a GPTQ or an AWQ file.
        qzeros: likewise.
        scales: likewise.
        g_idx: as in a GPTQ file. Default: None.
        bits: 4 or 8.
        packing_format: as in the file's configuration.

    Raises:
        ValueError: another packing format, or as of `from_gptq` and `from_awq`.
    """
    if packing_format == "auto_round:auto_awq":
        return from_awq(qweight, qzeros, scales, bits=bits)
    known = ", ".join([*AUTO_ROUND, "auto_round:auto_awq"])
    expect("from_auto_round: packing_format", packing_format in AUTO_ROUND, f"one of {known}", repr(packing_format))
    return from_gptq(qweight, qzeros, scales, g_idx, bits=bits, checkpoint_format=AUTO_ROUND[packing_format])
