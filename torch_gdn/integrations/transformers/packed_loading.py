"""Makes the packed parameters of a model from the tensors of a quantised file, in transformers' loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from torch_gdn.integrations.transformers.packed_layers import PackedLinear, tensors_of
from torch_gdn.quantized import PackedWeight, stack
from torch_gdn.quantized.formats import EXPERTS, Format
from torch_gdn.quantized.packed_weight import combined


class Pack(ConversionOps):
    """Makes the parameters of a packed weight, or dequantises it if the model's layer is not packed. A weight that the
    files have unquantised stays so. It takes the tensors of a matrix, or of a layer's experts, gate above up, as the
    file has them in one.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> Pack:
        return self  # transformers copies converters for each parameter

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **unused: Any
    ) -> dict[str, Any]:
        packing = self.quantizer.packings.get(full_layer_name)
        if packing is None:
            x = self.unquantized(input_dict)
            return {full_layer_name: self.quantizer.unquantized(full_layer_name, x, model)}
        weight = self.packed(input_dict, packing.bits)
        if full_layer_name in self.quantizer.dense:
            return {full_layer_name: weight.dequantize(model.get_parameter(full_layer_name).dtype)}
        layer, _, _ = full_layer_name.rpartition(".")
        module = model.get_submodule(layer)
        if isinstance(module, PackedLinear):
            module.order = weight.order
        elif weight.order is not None:
            raise ValueError(f"{layer}: expected an embedding without act-order (desc_act), got sorted columns")
        return tensors_of(weight, full_layer_name)

    def unquantized(self, input_dict: dict[str, Any]) -> Tensor:
        return by_ending(input_dict)["weight"]

    def packed(self, input_dict: dict[str, Any], bits: int) -> PackedWeight:
        weight: PackedWeight = self.quantizer.format.convert(**by_ending(input_dict), bits=bits)
        return weight


class PackExperts(Pack):
    """Stacks the tensors of a layer's experts, unless the file has them stacked."""

    def __init__(self, quantizer: Any, projections: Sequence[str]) -> None:
        """`projections` are the prefixes of the tensors' names, gate before up."""
        super().__init__(quantizer)
        self.projections = projections

    def unquantized(self, input_dict: dict[str, Any]) -> Tensor:
        return torch.cat([torch.stack(input_dict.pop(f"{projection}.weight")) for projection in self.projections], 1)

    def packed(self, input_dict: dict[str, Any], bits: int) -> PackedWeight:
        return joined([self.projection(input_dict, projection, bits) for projection in self.projections])

    def projection(self, input_dict: dict[str, Any], projection: str, bits: int) -> PackedWeight:
        """Takes the projection's tensors out of `input_dict`, so that they are freed."""
        form: Format = self.quantizer.format
        sources = {ending: f"{projection}.{ending}" for ending in form.endings}
        own = {ending: input_dict.pop(source) for ending, source in sources.items() if source in input_dict}
        experts = []
        while own[form.tensors[0].name]:
            experts.append(form.convert(**{ending: tensors.pop(0) for ending, tensors in own.items()}, bits=bits))
        return experts[0] if form.experts_are_stacked else stack(experts)


def by_ending(input_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {ending_of(source): x[0] if isinstance(x, list) else x for source, x in input_dict.items()}


def ending_of(source: str) -> str:
    """Returns the last part of a tensor's name. Fused experts' scales have the name of their matrix before "_scale"."""
    last = source.rpartition(".")[2]
    fused = next((name for name in EXPERTS if last.startswith(name)), None)
    return last if fused is None else f"weight{last.removeprefix(fused)}"


def joined(weights: list[PackedWeight]) -> PackedWeight:
    """Puts the rows of up after those of gate."""
    if len(weights) == 1:
        return weights[0]
    if len({(weight.bits, weight.group_size) for weight in weights}) > 1:
        raise ValueError("gate_up_proj: expected gate_proj and up_proj in the same bits and groups, got others")
    return combined(weights, partial(torch.cat, dim=-2))


def converters_of(quantizer: Any, conversions: list[Any]) -> Iterator[WeightConverter]:
    """Yields the conversions of experts and of all other layers, which follow the model's own."""
    form: Format = quantizer.format
    experts = "mlp.switch_mlp." if form.experts_are_stacked else "mlp.experts.*."
    endings = sorted(form.endings, key=len, reverse=True)  # the first that begins a name is taken
    on_cpu = {"force_cpu": True} if form.has_float8 else {}  # mps has no such dtype; bytes go there
    copies = [] if form.experts_are_stacked else [x for x in conversions if merges_experts(x)]
    for each in copies:
        projections = [source.removesuffix(".weight") for source in each._original_source_patterns]
        sources = [f"{projection}.{ending}" for projection in projections for ending in endings]
        packing = PackExperts(quantizer, projections)
        yield each.copy(sources, list(each._original_target_patterns), operations=[packing], **on_cpu)
    for name, names in EXPERTS.items():
        projections = [f"{experts}{each}" for each in names]
        sources = [f"{projection}.{ending}" for projection in projections for ending in endings]
        if not any(f"{projections[0]}.weight" in copy.source_patterns for copy in copies):
            yield WeightConverter(sources, f"mlp.experts.{name}", [PackExperts(quantizer, projections)], **on_cpu)
        if form.has_float8:
            fused = [f"mlp.experts.{name}{each.name.removeprefix('weight')}" for each in reversed(form.tensors)]
            yield WeightConverter(fused, f"mlp.experts.{name}", [Pack(quantizer)], **on_cpu)
    yield WeightConverter(endings, "weight", [Pack(quantizer)], **on_cpu)


def others_of(form: Format, conversions: list[Any]) -> list[Any]:
    """Returns a model's own conversions that those of `converters_of` do not replace. FP8 has codes named "weight"."""
    return [x for x in conversions if not (form.has_float8 and merges_experts(x))]


def merges_experts(conversion: Any) -> bool:
    """Returns whether a model's own conversion only stacks the experts' matrices and puts up after gate."""
    if not isinstance(conversion, WeightConverter):
        return False
    does = [(type(operation), getattr(operation, "dim", None)) for operation in conversion.operations]
    stacks = does in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    named = all(source.endswith(".weight") and "*." in source for source in sources)
    return stacks and named and len(targets) == 1 and targets[0].rpartition(".")[2] in EXPERTS


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in EXPERTS)
