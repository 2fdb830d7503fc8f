"""Describes each format of quantised weights. A configuration says what its files hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_gdn.quantized import PackedWeight, from_auto_round, from_awq, from_compressed_tensors, from_gptq, from_mlx

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """A file format: the endings of a packed layer's tensor names, and how to make a packed weight of them."""

    method: str
    words: str  # ending of the name of the tensor with codes
    scales: str
    others: tuple[str, ...]  # endings of the other required tensors
    optional: tuple[str, ...]
    transposed: bool  # whether scales are [K / group, N]
    layout: Callable[[int, int, int], Sizes]  # makes the shape of the words of [N, K] from N, K and bits
    convert: Callable[..., PackedWeight]  # takes the tensors by ending, and bits
    experts_are_stacked: bool = False
    act_order: bool = False  # whether columns may have another order than their groups

    @property
    def experts(self) -> str:
        """Returns what precedes gate_proj, up_proj and down_proj."""
        return "mlp.switch_mlp." if self.experts_are_stacked else "mlp.experts.*."

    @property
    def endings(self) -> tuple[str, ...]:
        return (self.words, self.scales, *self.others, *self.optional)


def words_along_rows(N: int, K: int, bits: int) -> Sizes:
    return N, K * bits // 32


def words_along_columns(N: int, K: int, bits: int) -> Sizes:
    return K * bits // 32, N


def words_of_rows(N: int, K: int, bits: int) -> Sizes:
    return K, N * bits // 32


def format_of(config: Mapping[str, Any] | None) -> Format | None:
    """Returns the format that a model's `quantization_config` names, or None if transformers has to load it.

    Raises:
        ValueError: The format is one of those below, but torch_gdn cannot hold its weights packed.
    """
    if not config:
        return None
    method = config.get("quant_method")
    known = {"gptq": gptq, "awq": awq, "auto-round": auto_round, "compressed-tensors": compressed_tensors}
    if method is None and {"bits", "group_size"} <= config.keys():
        return mlx(config)
    return known[method](config) if method in known else None


def expect(name: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"quantization_config: {name}: expected {expected}, got {got!r}")


def mlx(config: Mapping[str, Any]) -> Format:
    modes = {config.get("mode", "affine")}
    modes |= {layer.get("mode", "affine") for layer in config.values() if isinstance(layer, Mapping)}
    expect("mode", modes == {"affine"}, "affine", ", ".join(sorted(modes)))
    return Format("mlx", "weight", "scales", ("biases",), (), False, words_along_rows, from_mlx, True)


def gptq(config: Mapping[str, Any]) -> Format:
    stored = config.get("checkpoint_format") or config.get("format") or "gptq"
    expect("checkpoint_format", stored in ("gptq", "gptq_v2"), "gptq or gptq_v2", stored)

    def convert(**tensors: Any) -> PackedWeight:
        return from_gptq(**tensors, checkpoint_format=stored)

    return of_gptq_tensors("gptq", convert, bool(config.get("desc_act")) and not config.get("static_groups"))


def of_gptq_tensors(method: str, convert: Callable[..., PackedWeight], act_order: bool = False) -> Format:
    optional = ("g_idx",)
    return Format(
        method, "qweight", "scales", ("qzeros",), optional, True, words_along_columns, convert, act_order=act_order
    )


def awq(config: Mapping[str, Any]) -> Format:
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    expect("version", version == "gemm", "gemm", version)
    return of_awq_tensors("awq", from_awq)


def of_awq_tensors(method: str, convert: Callable[..., PackedWeight]) -> Format:
    return Format(method, "qweight", "scales", ("qzeros",), (), True, words_of_rows, convert)


def auto_round(config: Mapping[str, Any]) -> Format | None:
    if config.get("data_type", "int") != "int" or (config.get("act_bits") or 16) < 16:
        return None
    layout = config.get("packing_format")
    known = ("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq")
    expect("packing_format", layout in known, f"one of {', '.join(known)}", layout)

    def convert(**tensors: Any) -> PackedWeight:
        return from_auto_round(**tensors, packing_format=str(layout))

    return (of_awq_tensors if layout == known[-1] else of_gptq_tensors)("auto-round", convert)


def compressed_tensors(config: Mapping[str, Any]) -> Format | None:
    """Returns None for formats in which activations are quantised too, or weights are not integers."""
    groups = config.get("config_groups") or {}
    formats = {group.get("format") or config.get("format") for group in groups.values()}
    extras = ("kv_cache_scheme", "transform_config")
    if formats != {"pack-quantized"} or any(config.get(extra) for extra in extras):
        return None
    sparsity = config.get("sparsity_config") or {}
    activations = ("input_activations", "output_activations")
    if sparsity.get("format", "dense") != "dense" or any(
        group.get(x) for group in groups.values() for x in activations
    ):
        return None

    def convert(weight_shape: Tensor | None = None, **tensors: Any) -> PackedWeight:
        return from_compressed_tensors(**tensors)

    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")
    return Format("compressed-tensors", "weight_packed", "weight_scale", (), optional, False, words_along_rows, convert)
