"""Reads files of GPTQ, of AWQ in the GEMM layout, and of AutoRound, which has the tensors of either."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn.quantized.formats import Format, OtherFormat, Stored, refusal
from torch_gdn.quantized.packed_weight import (
    PackedWeight,
    assemble,
    blocks,
    checked_words,
    expect,
    mask_of,
    pack,
    unpack,
)

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
    written, bits = config.get("checkpoint_format") or config.get("format") or "gptq", config.get("bits")
    if bits not in (4, 8) or written not in OFFSETS:
        raise refusal(f"GPTQ with {bits} bits in the format {written}")
    convert = partial(from_gptq, checkpoint_format=written)
    act_order = bool(config.get("desc_act")) and not config.get("static_groups")
    return Format("gptq", TENSORS, convert, g_idx="g_idx", act_order=act_order)


# ---- AWQ -------------------------------------------------------------------------------------------------------------

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


AWQ = Format(
    "awq",
    (
        Stored("qweight", rows="word", transposed=True),
        Stored("scales", columns="group", transposed=True),
        Stored("qzeros", rows="word", columns="group", transposed=True),
    ),
    from_awq,
    held_as=Format("gptq", TENSORS, partial(from_gptq, checkpoint_format="gptq_v2")),
    translate=as_gptq_v2,
)


def read_awq(config: Mapping[str, Any]) -> Format:
    bits, zero_point = config.get("bits", config.get("w_bit")), config.get("zero_point", True)
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    if bits != 4 or version != "gemm" or not zero_point:
        raise refusal(f"AWQ with {bits} bits in version {version} with zero_point {zero_point}")
    return AWQ


# ---- AutoRound -------------------------------------------------------------------------------------------------------

# The `checkpoint_format` of GPTQ's tensors, by packing format. AWQ's has none.
CHECKPOINT_FORMATS = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}
AUTO_AWQ = "auto_round:auto_awq"


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
        qweight, qzeros, scales: as in a GPTQ or an AWQ file.
        g_idx: as in a GPTQ file. Default: None.
        bits: 4 or 8.
        packing_format: as in the file's configuration.

    Raises:
        ValueError: another packing format, or as of `from_gptq` and `from_awq`.
    """
    if packing_format == AUTO_AWQ:
        return from_awq(qweight, qzeros, scales, bits=bits)
    known = f"one of {', '.join([*CHECKPOINT_FORMATS, AUTO_AWQ])}"
    expect("from_auto_round: packing_format", packing_format in CHECKPOINT_FORMATS, known, repr(packing_format))
    checkpoint_format = CHECKPOINT_FORMATS[packing_format]
    return from_gptq(qweight, qzeros, scales, g_idx, bits=bits, checkpoint_format=checkpoint_format)


def read_auto_round(config: Mapping[str, Any]) -> Format:
    bits, kind = config.get("bits"), config.get("data_type", "int")
    packed, activations = config.get("packing_format", "auto_round:auto_gptq"), config.get("act_bits") or 16
    got = f"AutoRound's {kind} of {bits} bits with activations of {activations} bits in {packed}"
    if kind != "int" or activations < 16:
        raise refusal(got, OtherFormat)
    if bits not in ((4,) if packed == AUTO_AWQ else (4, 8)):
        raise refusal(got)
    if packed == AUTO_AWQ:
        return replace(AWQ, method="auto-round")
    if packed not in CHECKPOINT_FORMATS:
        raise refusal(f"AutoRound's {packed}")
    convert = partial(from_gptq, checkpoint_format=CHECKPOINT_FORMATS[packed])
    return Format("auto-round", TENSORS, convert, g_idx="g_idx")
