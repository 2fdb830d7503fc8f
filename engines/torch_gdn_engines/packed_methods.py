"""Layers with packed weights, for the engines. An engine's own classes extend `Linear`, `Experts` and `Config`.

During loading a layer holds the checkpoint's tensors as published, then the form that torch_gdn's ops take. One layer
is converted after the other. The files say which layers are packed and how, and `torch_gdn.quantized` reads them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_gdn.quantized import PackedWeight
from torch_gdn.quantized.formats import Format, Packing, Sizes, Stored, unlike

NO_EXPONENT = 255  # NaN in e8m0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Matrices = dict[str, dict[str, Sizes]]  # as `Format.matrices` returns them


def empty(stored: Stored, *shape: int) -> Tensor:
    """Returns an empty tensor of the files. Floats are NaN until they are loaded.

    Rows of the weights are rows in memory, as torch_gdn's ops take them: most conversions then copy nothing.
    """
    *experts, first, last = shape
    sizes = (*experts, last, first) if stored.transposed else shape
    dtype = torch.float32 if stored.is_float else torch.int32 if stored.has_words else torch.uint8
    filled = torch.full(sizes, math.nan if stored.is_float else stored.is_exponent * NO_EXPONENT, dtype=dtype)
    return filled.mT if stored.transposed else filled


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


class Method:
    """Says what an engine's layer does with packed weights.

    Args:
        form: of the files.
        name: the layer's.
        matrices: its matrices in the files. Those of experts are the first one's: gate, up and down.
    """

    def __init__(self, form: Format, name: str, matrices: Matrices) -> None:
        self.format, self.name, self.matrices = form, name, matrices
        self.expected: set[str] = set()  # names of the layer's parameters that the files fill
        self.missing: set[str] = set()

    def packing_of(self, matrices: list[str], columns: int) -> Packing:
        """Returns how these matrices are packed, which one op multiplies."""
        first, *others = [self.format.packing(each, self.matrices[each], columns) for each in matrices]
        if any(each != first for each in others):
            raise unlike(self.name, ", ".join(f"{x.bits} bits in groups of {x.group_size}" for x in (first, *others)))
        return first

    def loading(
        self, stored: Stored, name: str, load: Callable[..., Any], rows: Callable[..., int]
    ) -> Callable[..., Any]:
        """Returns `load` for the files' tensors of a parameter of this name. It records that they were loaded.

        `rows` returns the rows of the matrix that the engine's other arguments name.
        """
        self.expected.add(name)
        self.missing.add(name)
        translate = self.format.translate

        @functools.wraps(load)
        def recorded(param: Any, loaded_weight: Tensor, *args: Any, **options: Any) -> Any:
            self.missing.discard(name)
            held = loaded_weight
            if translate:
                held = translate(stored.name, loaded_weight, rows(*args, **options))
            return load(param, held, *args, **options)

        return recorded

    def fill(self, part: Tensor, loaded: Tensor, name: str) -> None:
        if loaded.shape != part.shape:
            got = tuple(loaded.shape)
            raise ValueError(f"{self.name}: expected {name} of shape {tuple(part.shape)}, got {got}")
        part.copy_(loaded)

    def convert(self, packing: Packing, tensors: dict[str, Tensor], prefix: str = "") -> PackedWeight:
        """Converts a layer's tensors. Engines ignore missing ones in a quantised checkpoint.

        Nothing is missed if nothing was loaded, as with the load_format "dummy".
        """
        is_loaded = self.missing != self.expected
        missing = self.missing if is_loaded else set()
        for each in packing.tensors:
            x = tensors[each.name]
            if each.is_exponent and not is_loaded:
                x.zero_()
            has_gaps = (x == NO_EXPONENT).any() if each.is_exponent else each.is_float and not x.isfinite().all()
            if has_gaps or f"{prefix}{each.name}" in missing:
                raise ValueError(f"{self.name}: expected finite {each.name} for all groups, which the checkpoint lacks")
        floats = {each.name: tensors[each.name] for each in packing.tensors if each.is_float}
        dtype = smallest_exact(list(floats.values()))
        exact = tensors | {each: x.to(dtype) for each, x in floats.items()}
        return self.format.held.convert(**exact, bits=packing.bits)


def check_rows(name: str, packing: Packing, parts: list[int]) -> None:
    """Checks that matrices of so many rows, which a checkpoint stores separately, fill words."""
    packs_rows = any(each.rows == "word" for each in packing.tensors)
    if packs_rows and any(rows % packing.per_word for rows in parts):
        raise ValueError(f"{name}: expected matrices whose row counts are multiples of {packing.per_word}, got {parts}")


class Linear(Method):
    """A linear layer, or an embedding, by one op.

    The layer has weight, scales and biases, and `order` if it gathers the columns of x first."""

    dtype: torch.dtype  # x's dtype
    rows: list[int]  # of each matrix of a fused layer
    packing: Packing

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
        self.packing = self.packing_of(list(self.matrices), columns)
        check_rows(self.name, self.packing, self.rows)
        for each in self.packing.tensors:
            data = empty(each, *each.shape(sum(self.rows), columns, self.packing))
            layer.register_parameter(each.name, self.parameter_of(each, data, attributes))
        if self.packing.is_ordered:
            layer.register_parameter(self.format.g_idx, self.groups(torch.full((columns,), -1, dtype=torch.int32)))

    def parts_of(self, shard: Any) -> tuple[int, int]:
        """Returns the first and the last matrix of a fused layer that an engine's shard names: all, one or several."""
        shards = [0, len(self.rows) - 1] if shard is None else list(shard) if isinstance(shard, tuple) else [shard]
        parts = ["qkv".index(each) if isinstance(each, str) else each for each in shards]
        return parts[0], parts[-1]

    def rows_of(self, *shard: Any, **options: Any) -> int:
        first, last = self.parts_of(next(iter((*shard, *options.values())), None))
        return sum(self.rows[first : last + 1])

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
        names = [each.name for each in self.packing.tensors] + [self.format.g_idx or ""] * self.packing.is_ordered
        packed = self.convert(self.packing, take(layer, names))
        register(layer, packed)
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

    packings: dict[str, Packing]  # of "w13" and "w2"

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        **attributes: Any,
    ) -> None:
        width, self.packings = intermediate_size_per_partition, {}
        *gate_and_up, down = self.matrices
        for matrix, parts, rows, columns in (
            ("w13", gate_and_up, 2 * width, hidden_size),
            ("w2", [down], hidden_size, width),
        ):
            packing = self.packings[matrix] = self.packing_of(parts, columns)
            check_rows(self.name, packing, [rows // len(parts)])
            rows_of_one = functools.partial(rows_of_expert, rows // len(parts))
            for each in packing.tensors:
                name, load = f"{matrix}_{each.name}", functools.partial(self.load, int(each.transposed))
                data = empty(each, num_experts, *each.shape(rows, columns, packing))
                layer.register_parameter(name, as_parameter(data, self.loading(each, name, load, rows_of_one)))
            for name, check in self.checks.items():
                layer.register_parameter(f"{matrix}_{name}", as_parameter(torch.zeros(0), check))

    @property
    def checks(self) -> dict[str, Callable[..., bool]]:
        """Returns what refuses each tensor that the ops cannot use, by its name."""
        order = {self.format.g_idx: self.refuse_order} if self.format.g_idx else {}
        return {"bias": self.refuse_biases, **order}

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
        self.fill(part if shard_id == "w2" else part.chunk(2, rows)[shard_id == "w3"], loaded_weight, weight_name)
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
        for matrix, packing in self.packings.items():
            take(layer, list(self.checks), f"{matrix}_")
            tensors = take(layer, [each.name for each in packing.tensors], f"{matrix}_")
            packed = self.convert(packing, tensors, f"{matrix}_")
            register(layer, packed, f"{matrix}_")


def rows_of_expert(rows: int, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False) -> int:
    """Takes an engine's arguments about a matrix of an expert, which has so many rows."""
    return rows


def register(layer: Any, packed: PackedWeight, prefix: str = "") -> None:
    """Gives the layer the tensors of a packed weight. E4m3 numbers have no biases, which are None then."""
    for name in ("weight", "scales", "biases"):
        x = getattr(packed, name)
        layer.register_parameter(f"{prefix}{name}", None if x is None else as_parameter(x))


def take(layer: Any, names: list[str], prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors by name without the prefix, and removes them from the layer."""
    tensors = {name: getattr(layer, f"{prefix}{name}").data for name in names}
    for name in names:
        delattr(layer, f"{prefix}{name}")
    return tensors


class Config:
    """Answers what an engine asks the configuration of any format, and finds a layer's tensors in the files."""

    method: str  # the format's name in the engine
    read: Callable[[Mapping[str, Any]], Format]

    def __init__(self, form: Format) -> None:
        super().__init__()
        self.format = form
        self.shapes: dict[str, Sizes] = {}  # by the names of the files' tensors

    @classmethod
    def get_name(cls) -> Any:
        return cls.method

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        form = cls.read(config)
        form.say_what_is_left_out()
        return cls(form)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
