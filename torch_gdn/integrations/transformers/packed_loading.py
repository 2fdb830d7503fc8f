"""Makes the packed parameters of a model from the tensors of a quantised file, in transformers' loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from torch_gdn.integrations.transformers.packed_formats import Format
from torch_gdn.integrations.transformers.packed_layers import PackedExperts, PackedLinear, tensors_of
from torch_gdn.quantized import PackedWeight, stack

EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Norms whose weight mlx-lm keeps plus one, of models whose own weight is added to one.
SHIFTED_NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


@dataclass(frozen=True)
class Packing:
    """Says how a parameter of the model is packed in the files."""

    bits: int
    group: int


def first(tensors: Any) -> Tensor:
    found: Tensor = tensors[0] if isinstance(tensors, list) else tensors
    return found


class PackLayer(ConversionOps):
    """Keeps a layer's codes packed, dequantises them if the model's layer holds numbers, or leaves numbers alone."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> PackLayer:
        return self  # transformers copies converters for each parameter

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **unused: Any
    ) -> dict[str, Any]:
        tensors = {source.rpartition(".")[2]: first(found) for source, found in input_dict.items()}
        layer, _, _ = full_layer_name.rpartition(".")
        packing = self.quantizer.packings.get(full_layer_name)
        if packing is None:
            return {full_layer_name: self.quantizer.number(full_layer_name, tensors["weight"], model)}
        weight = self.quantizer.format.convert(**tensors, bits=packing.bits).for_dtype(self.quantizer.dtype)
        module = model.get_submodule(layer)
        if full_layer_name in self.quantizer.dense:
            return {full_layer_name: weight.dequantize(module.weight.dtype)}
        if isinstance(module, PackedLinear):
            module.order = weight.order
        elif weight.order is not None:
            raise ValueError(f"{layer}: expected an embedding without act-order (desc_act), got sorted columns")
        return {
            f"{layer}.{name}": x for name, x in zip(("weight", "scales", "biases"), tensors_of(weight), strict=True)
        }


class PackExperts(ConversionOps):
    """Stacks the packed tensors of a layer's experts, unless the file has them stacked."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> PackExperts:
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **unused: Any
    ) -> dict[str, Any]:
        layer, _, name = full_layer_name.rpartition(".")
        experts = model.get_submodule(layer)
        packing = self.quantizer.packings[full_layer_name]
        projections = [self.projection(input_dict, each, packing.bits, experts) for each in EXPERTS[name]]
        weight = joined(projections).for_dtype(self.quantizer.dtype)
        names = (name, f"{name}_scales", f"{name}_biases")
        return {f"{layer}.{each}": x for each, x in zip(names, tensors_of(weight), strict=True)}

    def projection(self, input_dict: dict[str, Any], name: str, bits: int, experts: PackedExperts) -> PackedWeight:
        """Takes the projection's tensors out of `input_dict`, so that they are freed."""
        sources = [source for source in input_dict if f".{name}." in source]
        of_endings = {source.rpartition(".")[2]: input_dict.pop(source) for source in sources}
        convert = self.quantizer.format.convert
        if (
            all(len(found) == 1 for found in of_endings.values())
            and first(of_endings[self.quantizer.format.words]).dim() == 3
        ):
            return convert(**{ending: first(found) for ending, found in of_endings.items()}, bits=bits)
        return stack(
            [
                convert(**{ending: found.pop(0) for ending, found in of_endings.items()}, bits=bits)
                for _ in range(experts.num_experts)
            ]
        )


def joined(weights: list[PackedWeight]) -> PackedWeight:
    """Puts the rows of up after those of gate."""
    if len(weights) == 1:
        return weights[0]
    if len({(weight.bits, weight.group_size) for weight in weights}) > 1:
        raise ValueError("gate_up_proj: expected gate_proj and up_proj in the same bits and groups, got others")
    dtypes = {weight.scales.dtype for weight in weights}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return PackedWeight(
        torch.cat([weight.weight for weight in weights], dim=-2),
        torch.cat([weight.scales.to(dtype) for weight in weights], dim=-2),
        torch.cat([weight.biases.to(dtype) for weight in weights], dim=-2),
        weights[0].bits,
    )


def converters_of(quantizer: Any) -> Iterator[WeightConverter]:
    """Yields the conversions of experts and of all other layers, which follow the model's own."""
    form: Format = quantizer.format
    for name, projections in EXPERTS.items():
        sources = [f"{form.experts}{each}.{ending}" for each in projections for ending in form.endings]
        yield WeightConverter(sources, f"mlp.experts.{name}", [PackExperts(quantizer)])
    yield WeightConverter(list(form.endings), "weight", [PackLayer(quantizer)])


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in EXPERTS)
