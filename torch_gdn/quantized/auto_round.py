"""Reads AutoRound files, which have the tensors of GPTQ's or of AWQ's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from torch_gdn.quantized import awq, gptq
from torch_gdn.quantized.formats import Format, OtherFormat, refusal
from torch_gdn.quantized.packed_weight import PackedWeight
from torch_gdn.quantized.packing import expect

# The `checkpoint_format` of GPTQ's tensors, by packing format. AWQ's has none.
CHECKPOINT_FORMATS = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}
AWQ = "auto_round:auto_awq"


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
    if packing_format == AWQ:
        return awq.from_awq(qweight, qzeros, scales, bits=bits)
    known = f"one of {', '.join([*CHECKPOINT_FORMATS, AWQ])}"
    expect("from_auto_round: packing_format", packing_format in CHECKPOINT_FORMATS, known, repr(packing_format))
    checkpoint_format = CHECKPOINT_FORMATS[packing_format]
    return gptq.from_gptq(qweight, qzeros, scales, g_idx, bits=bits, checkpoint_format=checkpoint_format)


def read(config: Mapping[str, Any]) -> Format:
    """Returns the format of files with this `quantization_config`, or raises what `configuration.read` does."""
    bits, kind = config.get("bits"), config.get("data_type", "int")
    packed, activations = config.get("packing_format", "auto_round:auto_gptq"), config.get("act_bits") or 16
    got = f"AutoRound's {kind} of {bits} bits with activations of {activations} bits in {packed}"
    if kind != "int" or activations < 16:
        raise refusal(got, OtherFormat)
    if bits not in ((4,) if packed == AWQ else (4, 8)):
        raise refusal(got)
    if packed == AWQ:
        return replace(awq.FORMAT, method="auto-round")
    if packed not in CHECKPOINT_FORMATS:
        raise refusal(f"AutoRound's {packed}")
    convert = partial(gptq.from_gptq, checkpoint_format=CHECKPOINT_FORMATS[packed])
    return Format("auto-round", gptq.TENSORS, convert, g_idx="g_idx")
