"""Reads files of compressed-tensors (llm-compressor's): "pack-quantized", "float-quantized", "mxfp4-pack-quantized"."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_gdn.quantized.floats import COMPRESSED_MXFP4, float8
from torch_gdn.quantized.formats import Format, OtherFormat, Stored, refusal
from torch_gdn.quantized.packed_weight import PackedWeight, assemble, checked_words, expect, unpack
from torch_gdn.reference.quantized import BLOCK


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


TENSORS = (
    Stored("weight_packed", columns="word"),
    Stored("weight_scale", columns="group"),
    Stored("weight_zero_point", rows="word", columns="group"),
)
NOT_READ = ("transform_config", "kv_cache_scheme")  # settings of a configuration that ask for more than packed weights


def read(config: Mapping[str, Any]) -> Format:
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise refusal("compressed-tensors without config_groups", OtherFormat)
    written = sorted({str(group.get("format") or config.get("format")) for group in groups})
    also = [each for each in NOT_READ if config.get(each)]
    quantised = [
        each for each in ("input_activations", "output_activations") if any(group.get(each) for group in groups)
    ]
    schemes = [group.get("weights") or {} for group in groups]
    if (
        written == ["float-quantized"]
        and all(map(is_float8, schemes))
        and not {*also, *quantised} - {"input_activations"}
    ):
        return float8("compressed-tensors", "weight_scale", "activations in FP8" if quantised else "")
    also += quantised
    if written == ["mxfp4-pack-quantized"] and not also and all(map(is_mxfp4, schemes)):
        return COMPRESSED_MXFP4
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        also.append("sparsity_config")
    kinds = {kind_of(scheme): is_packable(scheme) for scheme in schemes}
    if also or written != ["pack-quantized"]:
        settings = f" with {', '.join(also)}" if also else ""
        raise refusal(f"compressed-tensors' {', '.join(written)} of {', '.join(kinds)}{settings}", OtherFormat)
    if refused := [kind for kind, packable in kinds.items() if not packable]:
        raise refusal(f"compressed-tensors with {', '.join(refused)}")
    sizes = frozenset(x["group_size"] for x in schemes if x["strategy"] == "group" and x.get("group_size"))
    optional, ignored = ("weight_zero_point",), ("weight_shape",)
    return Format("compressed-tensors", TENSORS, convert, optional, "weight_g_idx", ignored, sizes)


def kind_of(scheme: Mapping[str, Any]) -> str:
    return f"{scheme.get('num_bits')}-bit {scheme.get('type')} weights by {scheme.get('strategy')}"


def is_packable(scheme: Mapping[str, Any]) -> bool:
    is_known = scheme.get("type") == "int" and scheme.get("strategy") in ("group", "channel")
    return is_known and scheme.get("num_bits") in (4, 8) and not scheme.get("dynamic")


def is_mxfp4(scheme: Mapping[str, Any]) -> bool:
    names = ("type", "num_bits", "strategy", "group_size")
    return tuple(map(scheme.get, names)) == ("float", 4, "group", 32) and not scheme.get("dynamic")


def is_float8(scheme: Mapping[str, Any]) -> bool:
    is_known = (scheme.get("type"), scheme.get("num_bits"), scheme.get("dynamic") or False) == ("float", 8, False)
    by_block = scheme.get("strategy") == "block" and list(scheme.get("block_structure") or []) == [BLOCK, BLOCK]
    return is_known and (by_block or scheme.get("strategy") in ("channel", "tensor"))


def convert(weight_shape: Tensor | None = None, **tensors: Any) -> PackedWeight:
    """Calls `from_compressed_tensors` without the shape, which the codes and scales have, too."""
    return from_compressed_tensors(**tensors)
