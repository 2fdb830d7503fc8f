"""Layers on mps with packed weights. During loading they hold the checkpoint's tensors as published, then the form that
torch_gdn's ops take. One layer is converted after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import BasevLLMParameter, GroupQuantScaleParameter, PackedvLLMParameter
from vllm.model_executor.utils import set_weight_attrs

from torch_gdn import quantized
from torch_gdn.integrations.vllm import moe
from torch_gdn.integrations.vllm.layers import TorchGdnFusedMoEMethod, check_experts
from torch_gdn.quantized.awq import as_gptq_v2


class Stored(NamedTuple):
    """A tensor of a published layout, of weights [N, K]."""

    name: str
    is_transposed: bool  # [columns, rows]
    has_groups: bool  # a column is a group of K; if False, one of K itself
    packed: str | None  # "rows" or "columns": an int32 word packs several of them; None for floats

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
    is_awq: bool = False  # the files have AWQ's words, which become those of gptq_v2 as they are loaded

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
        """Converts a layer. `lacking` tensors were not loaded; vLLM ignores them in a quantised checkpoint."""
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


def as_parameter(x: Tensor) -> Parameter:
    return Parameter(x, requires_grad=False)


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
        """Returns the missing tensors; none if nothing was loaded, as with vLLM's load_format "dummy"."""
        return self.missing if self.missing != self.expected else set()


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """Runs a linear layer, or an embedding, by one op.

    The layer has weight, scales and biases, and `order` if it gathers the columns of x first."""

    def __init__(self, packing: Packing, name: str) -> None:
        self.packing, self.name, self.loaded = packing, name, Loaded()

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
        columns, load = input_size_per_partition, attributes["weight_loader"]
        self.packing.check(self.name, output_partition_sizes, columns)
        self.dtype = params_dtype
        for each in self.packing.tensors():
            data = each.empty(*each.shape(sum(output_partition_sizes), columns, self.packing))
            dims = {"input_dim": 1 - each.is_transposed, "output_dim": int(each.is_transposed)}
            options = {
                "data": data,
                "weight_loader": self.loaded.noting(each.name, self.packing.loading(each.name, load)),
                **dims,
            }
            if each.packed is None:
                layer.register_parameter(each.name, GroupQuantScaleParameter(**options))
                continue
            packed_dim = dims["output_dim" if each.packed == "rows" else "input_dim"]
            options |= {"packed_dim": packed_dim, "packed_factor": self.packing.per_word}
            layer.register_parameter(each.name, PackedvLLMParameter(**options))
        if self.packing.is_ordered:
            order = torch.full((columns,), -1, dtype=torch.int32)
            layer.register_parameter("g_idx", BasevLLMParameter(data=order, weight_loader=self.load_groups))

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

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return embed_tokens

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        rows: Tensor = torch.ops.gdn.dequantize(
            layer.weight, layer.scales, layer.biases, self.packing.bits, input_, self.dtype
        )
        return rows


class PackedExpertsMethod(FusedMoEMethodBase):
    """Runs routed experts. The layer has w13_weight, w13_scales, w13_biases and the same for w2."""

    is_monolithic = False

    def __init__(self, packing: Packing, name: str, config: Any) -> None:
        super().__init__(config)
        check_experts(config)
        self.packing, self.name, self.loaded = packing, name, Loaded()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width = intermediate_size_per_partition
        self.dtype = params_dtype
        self.packing.check(self.name, [width], hidden_size)
        self.packing.check(self.name, [hidden_size], width)
        for matrix, rows, columns in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            for each in self.packing.tensors():
                data = each.empty(num_experts, *each.shape(rows, columns, self.packing))
                load = self.packing.loading(each.name, functools.partial(self.load, int(each.is_transposed)))
                name = f"{matrix}_{each.name}"
                layer.register_parameter(name, as_parameter(data))
                set_weight_attrs(getattr(layer, name), {"weight_loader": self.loaded.noting(name, load)})
            for name, check in (("bias", self.refuse_biases), ("g_idx", self.refuse_order)):
                layer.register_parameter(f"{matrix}_{name}", as_parameter(torch.zeros(0)))
                set_weight_attrs(getattr(layer, f"{matrix}_{name}"), {"weight_loader": check})

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

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    apply = moe.routed_experts


EXPERTS = (TorchGdnFusedMoEMethod, PackedExpertsMethod)  # the methods of routed experts on mps


def take(layer: Any, names: list[str]) -> dict[str, Tensor]:
    """Returns the tensors and removes them from the layer."""
    taken = {name: getattr(layer, name).data for name in names}
    for name in names:
        delattr(layer, name)
    return taken


# Helpers for the configurations of all formats.

SUPPORTED = (
    "weights of bfloat16, float16, float32, or of 4 or 8 bits as compressed-tensors (pack-quantized), GPTQ, AWQ, "
    "AutoRound and MLX write them"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def refusal(got: str) -> ValueError:
    return ValueError(f"quantization: expected {SUPPORTED}, on mps, got {got}")


def packed_method(layer: Any, name: str, packing: Packing) -> Any:
    if isinstance(layer, RoutedExperts):
        return PackedExpertsMethod(packing, name, layer.moe_config)
    return PackedLinearMethod(packing, name)


def plain_method(layer: Any) -> Any:
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def matrices_of(layer: Any, name: str) -> list[str]:
    """Returns the names that a configuration may use for the layer. For experts they are the first one's matrices."""
    if not isinstance(layer, RoutedExperts):
        return [name]
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [f"{name}.0.{each}" for each in projections if each is not None]


def the_same(name: str, found: list[Any]) -> Any:
    if any(each != found[0] for each in found):
        raise ValueError(f"{name}: expected matrices that are all quantised the same way, got {found}")
    return found[0]
