"""Quantised checkpoints for engines: their layouts and formats, and layers with packed weights.

During loading a layer holds the checkpoint's tensors as published, then the form that torch_gdn's ops take. One layer
is converted after the other. An engine's own classes extend `Linear` and `Experts`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_gdn import quantized
from torch_gdn.quantized.awq import as_gptq_v2
from torch_gdn.quantized.gptq import AUTO_ROUND


class Stored(NamedTuple):
    """A tensor of a published layout, of weights [N, K]."""

    name: str
    is_transposed: bool  # [columns, rows]
    has_groups: bool  # a column is a group of K, or one of K columns
    packed: str | None  # if an int32 word packs several "rows" or "columns"; None for floats

    def shape(self, rows: int, columns: int, packing: Packing) -> tuple[int, int]:
        columns //= packing.group_of(columns) if self.has_groups else 1
        rows //= packing.per_word if self.packed == "rows" else 1
        columns //= packing.per_word if self.packed == "columns" else 1
        return (columns, rows) if self.is_transposed else (rows, columns)

    def empty(self, *shape: int) -> Tensor:
        """Returns an empty tensor. Floats are NaN until they are loaded.

        Rows of the weights are rows in memory, as torch_gdn's ops take them: most conversions then copy nothing.
        """
        dtype = torch.float32 if self.packed is None else torch.int32
        *experts, first, last = shape
        sizes = (*experts, last, first) if self.is_transposed else shape
        filled = torch.full(sizes, 0 if self.packed else math.nan, dtype=dtype)
        return filled.mT if self.is_transposed else filled


LAYOUTS = {
    "gptq": (
        Stored("qweight", True, False, "columns"),
        Stored("qzeros", True, True, "rows"),
        Stored("scales", True, True, None),
    ),
    "compressed-tensors": (
        Stored("weight_packed", False, False, "columns"),
        Stored("weight_zero_point", False, True, "rows"),
        Stored("weight_scale", False, True, None),
    ),
    "mlx": (
        Stored("weight", False, False, "columns"),
        Stored("scales", False, True, None),
        Stored("biases", False, True, None),
    ),
}
CONVERTERS: dict[str, Callable[..., quantized.PackedWeight]] = {
    "compressed-tensors": quantized.from_compressed_tensors,
    "mlx": quantized.from_mlx,
}


@dataclass(frozen=True)
class Packing:
    """Describes how a checkpoint packs a layer's weights."""

    layout: str
    bits: int
    group_size: int  # -1 if a row is one group
    is_symmetric: bool = False
    is_ordered: bool = False  # the tensor g_idx gives a column's group
    checkpoint_format: str = "gptq"  # for GPTQ's layout: how its zero points are stored
    is_awq: bool = False  # the files have AWQ's words, which loading turns into those of gptq_v2

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def group_of(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size

    def tensors(self) -> list[Stored]:
        has_zeros = not (self.layout == "compressed-tensors" and self.is_symmetric)
        return [each for each in LAYOUTS[self.layout] if has_zeros or each.name != "weight_zero_point"]

    def check(self, name: str, parts: list[int], columns: int) -> None:
        """Checks sizes. `parts` are the rows of each matrix that a checkpoint stores separately."""
        if self.bits not in (4, 8):
            raise ValueError(f"{name}: expected weights of 4 or 8 bits on mps, got {self.bits} bits")
        group = self.group_of(columns)
        if group < 32 or group % 32 or columns % group:
            raise ValueError(
                f"{name}: expected a group size that is a multiple of 32 and divides {columns} columns, "
                f"got {self.group_size}"
            )
        packs_rows = any(each.packed == "rows" for each in self.tensors())
        if packs_rows and any(rows % self.per_word for rows in parts):
            raise ValueError(
                f"{name}: expected matrices whose numbers of rows are multiples of {self.per_word} in the layout "
                f"{self.layout}, got {parts}"
            )

    def loading(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `load` for the files' tensors of this name, which it gets in the layout."""
        if not self.is_awq:
            return load

        def translated(param: Any, loaded_weight: Tensor, *args: Any, **options: Any) -> Any:
            return load(param, as_gptq_v2(name, loaded_weight), *args, **options)

        return translated

    def convert(self, name: str, stored: dict[str, Tensor], lacking: set[str]) -> quantized.PackedWeight:
        """Converts a layer. `lacking` tensors were not loaded; engines ignore them in a quantised checkpoint."""
        for each in self.tensors():
            has_gaps = each.packed is None and not stored[each.name].isfinite().all()
            if has_gaps or each.name in lacking:
                raise ValueError(f"{name}: expected finite {each.name} for all groups, which the checkpoint lacks")
        floats = {each.name: stored[each.name] for each in self.tensors() if each.packed is None}
        dtype = smallest_exact(list(floats.values()))
        stored = stored | {each: x.to(dtype) for each, x in floats.items()}
        if self.layout == "gptq":
            return quantized.from_gptq(**stored, bits=self.bits, checkpoint_format=self.checkpoint_format)
        return CONVERTERS[self.layout](**stored, bits=self.bits)


def smallest_exact(tensors: list[Tensor]) -> torch.dtype:
    """Returns a dtype of 16 bits that holds numbers of float32 exactly, else float32."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(x.to(dtype).float(), x) for x in tensors):
            return dtype
    return torch.float32


def as_parameter(x: Tensor, weight_loader: Callable[..., Any] | None = None) -> Parameter:
    """Returns a parameter. An engine calls its `weight_loader` with the files' tensors."""
    parameter = Parameter(x, requires_grad=False)
    if weight_loader is not None:
        parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    return parameter


class Loaded:
    """Records which of a layer's tensors are loaded."""

    def __init__(self) -> None:
        self.expected: set[str] = set()
        self.missing: set[str] = set()

    def noting(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        self.expected.add(name)
        self.missing.add(name)

        @functools.wraps(load)
        def noted(*args: Any, **options: Any) -> Any:
            self.missing.discard(name)
            return load(*args, **options)

        return noted

    def lacking(self) -> set[str]:
        """Returns the missing tensors; none if nothing was loaded, as with the load_format "dummy"."""
        return self.missing if self.missing != self.expected else set()


class Method:
    """Says what an engine's layer does with packed weights, by the layer's name."""

    def __init__(self, packing: Packing, name: str) -> None:
        self.packing, self.name, self.loaded = packing, name, Loaded()


class Linear(Method):
    """A linear layer, or an embedding, by one op.

    The layer has weight, scales and biases, and `order` if it gathers the columns of x first."""

    dtype: torch.dtype  # x's dtype
    rows: list[int]  # rows of each matrix of a fused layer

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        columns, self.rows, self.dtype = input_size_per_partition, output_partition_sizes, params_dtype
        self.packing.check(self.name, self.rows, columns)
        for each in self.packing.tensors():
            data = each.empty(*each.shape(sum(self.rows), columns, self.packing))
            layer.register_parameter(each.name, self.parameter_of(each, data, attributes))
        if self.packing.is_ordered:
            layer.register_parameter("g_idx", self.groups(torch.full((columns,), -1, dtype=torch.int32)))

    def parameter_of(self, stored: Stored, data: Tensor, attributes: dict[str, Any]) -> Parameter:
        """Returns the engine's parameter for a tensor of the files. `attributes` are the engine's."""
        raise NotImplementedError

    def groups(self, order: Tensor) -> Parameter:
        return as_parameter(order, self.load_groups)

    def load_groups(self, parameter: Tensor, loaded: Tensor, *part: Any) -> None:
        """Loads the group of each column. All matrices of a fused layer multiply the same columns of x."""
        first = bool((parameter == -1).all())
        if loaded.shape != parameter.shape or not (first or torch.equal(parameter.data.cpu(), loaded.cpu())):
            raise ValueError(
                f"{self.name}: expected the same g_idx of {len(parameter)} columns for all matrices of the layer, got "
                "others"
            )
        parameter.data.copy_(loaded)

    def process_weights_after_loading(self, layer: Any) -> None:
        names = [each.name for each in self.packing.tensors()] + ["g_idx"] * self.packing.is_ordered
        packed = self.packing.convert(self.name, take(layer, names), self.loaded.lacking())
        for name in ("weight", "scales", "biases"):
            layer.register_parameter(name, as_parameter(getattr(packed, name)))
        layer.order = packed.order

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.order is not None:
            x = x.index_select(-1, layer.order)
        out: Tensor = torch.ops.gdn.quantized_linear(x, layer.weight, layer.scales, layer.biases, bias)
        return out

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        rows: Tensor = torch.ops.gdn.dequantize(
            layer.weight, layer.scales, layer.biases, self.packing.bits, input_, self.dtype
        )
        return rows


class Experts(Method):
    """Routed experts. The layer has w13_weight, w13_scales, w13_biases and the same for w2."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        self.packing.check(self.name, [width], hidden_size)
        self.packing.check(self.name, [hidden_size], width)
        for matrix, rows, columns in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            for each in self.packing.tensors():
                data = each.empty(num_experts, *each.shape(rows, columns, self.packing))
                load = self.packing.loading(each.name, functools.partial(self.load, int(each.is_transposed)))
                name = f"{matrix}_{each.name}"
                layer.register_parameter(name, as_parameter(data, self.loaded.noting(name, load)))
            for name, check in (("bias", self.refuse_biases), ("g_idx", self.refuse_order)):
                layer.register_parameter(f"{matrix}_{name}", as_parameter(torch.zeros(0), check))

    def load(
        self,
        rows: int,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        """Loads a tensor. `rows` is the dimension of a matrix's rows."""
        part = param.data[expert_id]
        part = part if shard_id == "w2" else part.chunk(2, rows)[shard_id == "w3"]
        if loaded_weight.shape != part.shape:
            got = tuple(loaded_weight.shape)
            raise ValueError(f"{self.name}: expected {weight_name} of shape {tuple(part.shape)}, got {got}")
        part.copy_(loaded_weight)
        return True

    def refuse_biases(self, param: Tensor, loaded_weight: Tensor, weight_name: str, *_: Any, **options: Any) -> bool:
        """Refuses biases, unless they are the zeros that GPTQ's files may have for models without biases."""
        if loaded_weight.any():
            raise ValueError(f"{self.name}: expected experts without biases on mps, got {weight_name}")
        return True

    def refuse_order(self, param: Tensor, loaded_weight: Tensor, weight_name: str, *_: Any, **options: Any) -> bool:
        """Refuses the order of GPTQ's desc_act. Files of GPTQ have a g_idx in any case."""
        if (loaded_weight.diff() < 0).any():
            raise ValueError(f"{self.name}: expected experts without act-order (desc_act) on mps, got {weight_name}")
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        for matrix in ("w13", "w2"):
            taken = take(layer, [f"{matrix}_{each.name}" for each in self.packing.tensors()])
            stored = {name.removeprefix(f"{matrix}_"): tensor for name, tensor in taken.items()}
            lacking = {name.removeprefix(f"{matrix}_") for name in self.loaded.lacking()}
            packed = self.packing.convert(self.name, stored, lacking)
            for name in ("weight", "scales", "biases"):
                layer.register_parameter(f"{matrix}_{name}", as_parameter(getattr(packed, name)))
            take(layer, [f"{matrix}_bias", f"{matrix}_g_idx"])


def take(layer: Any, names: list[str]) -> dict[str, Tensor]:
    """Returns the tensors and removes them from the layer."""
    taken = {name: getattr(layer, name).data for name in names}
    for name in names:
        delattr(layer, name)
    return taken


# Each format's name is in the configuration of a checkpoint's config.json.

Sizes = tuple[int, ...]
TENSORS = ("qweight", "qzeros", "scales")  # a layer's tensors in GPTQ's and in AWQ's layout
SUPPORTED = (
    "weights of bfloat16, float16, float32, or of 4 or 8 bits as compressed-tensors (pack-quantized), GPTQ, AWQ, "
    "AutoRound and, in vLLM, MLX write them"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def refusal(got: str) -> ValueError:
    return ValueError(f"quantization: expected {SUPPORTED}, on mps, got {got}")


class Layout(NamedTuple):
    """A format whose layers have the tensors of GPTQ. Their shapes tell bits and groups."""

    checkpoint_format: str
    is_awq: bool = False

    def packing_of(self, shapes: dict[str, Sizes], name: str) -> Packing | None:
        """Returns how the files pack a matrix, by the shapes of their tensors, or None if they do not."""
        found = {part: shapes.get(f"{name}.{part}") for part in TENSORS}
        weight, zeros, scales = found.values()
        if weight is None:
            return None
        if zeros is None or scales is None:
            missing = ", ".join(part for part, shape in found.items() if shape is None)
            raise ValueError(f"{name}: expected the tensors {', '.join(TENSORS)} in the files, got no {missing}")
        if (bits := 32 * zeros[1] // scales[1]) not in (4, 8):
            raise ValueError(f"{name}: expected weights of 4 or 8 bits on mps, got {bits} bits")
        columns = weight[0] * (1 if self.is_awq else 32 // bits)
        group = -1 if scales[0] == 1 else columns // scales[0]
        is_ordered = f"{name}.g_idx" in shapes
        return Packing("gptq", bits, group, False, is_ordered, self.checkpoint_format, self.is_awq)


class OneScheme(NamedTuple):
    """compressed-tensors, all of whose packed layers have the same bits and groups."""

    bits: int
    group_size: int

    def packing_of(self, shapes: dict[str, Sizes], name: str) -> Packing | None:
        if f"{name}.weight_packed" not in shapes:
            return None
        refuse_order_of_compressed_tensors(shapes, name)
        is_symmetric = f"{name}.weight_zero_point" not in shapes
        return Packing("compressed-tensors", self.bits, self.group_size, is_symmetric)


def gptq(config: dict[str, Any]) -> Layout:
    written = config.get("checkpoint_format") or "gptq"
    if config.get("bits") not in (4, 8) or written not in ("gptq", "gptq_v2"):
        raise refusal(f"GPTQ with {config.get('bits')} bits in the format {written}")
    return Layout(written)


def awq(config: dict[str, Any]) -> Layout:
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not config.get("zero_point", True):
        raise refusal(f"AWQ with {bits} bits in version {version} with zero_point {config.get('zero_point')}")
    return Layout("gptq_v2", is_awq=True)


def auto_round(config: dict[str, Any]) -> Layout:
    bits, kind = config.get("bits"), config.get("data_type", "int")
    packed, activations = config.get("packing_format", "auto_round:auto_gptq"), config.get("act_bits") or 16
    is_awq = packed == "auto_round:auto_awq"
    if kind != "int" or activations < 16 or bits not in ((4,) if is_awq else (4, 8)):
        raise refusal(f"AutoRound's {kind} of {bits} bits with activations of {activations} bits in {packed}")
    if not is_awq and packed not in AUTO_ROUND:
        raise refusal(f"AutoRound's {packed}")
    return Layout("gptq_v2", is_awq=True) if is_awq else Layout(AUTO_ROUND[packed])


def compressed_tensors(config: dict[str, Any]) -> OneScheme:
    """Reads the configuration of an engine that does not know each layer's group of the configuration."""
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise refusal("compressed-tensors without config_groups")
    schemes = [group.get("weights") or {} for group in groups]
    formats = {group.get("format") or config.get("format") for group in groups}
    kinds = {(each.get("type"), each.get("num_bits"), each.get("strategy"), each.get("group_size")) for each in schemes}
    also = [each for each in ("transform_config", "kv_cache_scheme") if config.get(each)]
    also += [each for each in ("input_activations", "output_activations") if any(group.get(each) for group in groups)]
    if also or formats != {"pack-quantized"} or len(kinds) != 1:
        raise refusal(f"compressed-tensors' {sorted(map(str, formats))} of {sorted(kinds, key=str)} with {also}")
    ((kind, bits, strategy, size),) = kinds
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        raise refusal(f"compressed-tensors with {bits}-bit {kind} weights by {strategy}")
    return OneScheme(bits, (size or 0) if strategy == "group" else -1)


def refuse_order_of_compressed_tensors(shapes: dict[str, Sizes], name: str) -> None:
    """Refuses the order of columns that older files have. Newer files have none."""
    if f"{name}.weight_g_idx" in shapes:
        raise refusal(f"{name} in compressed-tensors with act-order (weight_g_idx)")


def packing_of_layer(
    layout: Layout | OneScheme, shapes: dict[str, Sizes], prefix: str, names: list[str]
) -> Packing | None:
    """Returns how the files pack the matrices of a layer, which all must be alike, or None if they do not."""
    packing: Packing | None = the_same(prefix, with_one_group([layout.packing_of(shapes, name) for name in names]))
    return packing


def with_one_group(packings: list[Packing | None]) -> list[Packing | None]:
    """Gives matrices of one group the others' group size: a down projection may be as wide as the groups."""
    sizes = {each.group_size for each in packings if each is not None} - {-1}
    if len(sizes) != 1:
        return packings
    (size,) = sizes
    return [each and (replace(each, group_size=size) if each.group_size == -1 else each) for each in packings]


def the_same(name: str, found: list[Any]) -> Any:
    if any(each != found[0] for each in found):
        raise ValueError(f"{name}: expected matrices that are all quantised the same way, got {found}")
    return found[0]


class Config:
    """Answers what an engine asks the configuration of any format. An engine's own class extends it."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class LayoutConfig(Config):
    """The configuration of a format whose layers are packed in one layout."""

    method: str  # the format's name in the engine
    read: Callable[[dict[str, Any]], Layout | OneScheme]

    def __init__(self, layout: Layout | OneScheme) -> None:
        super().__init__()
        self.layout = layout

    @classmethod
    def get_name(cls) -> Any:
        return cls.method

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(cls.read(config))
