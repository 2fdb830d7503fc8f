"""What the files of a quantised model hold, by vLLM's names. A layer with packed tensors is packed, whatever the lists
of a configuration say: published lists often use other names than vLLM does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn.integrations.vllm.quantized_layers import (
    DTYPES,
    Packing,
    matrices_of,
    packed_method,
    plain_method,
    the_same,
)

Sizes = tuple[int, ...]
TENSORS = ("qweight", "qzeros", "scales")  # of a layer in GPTQ's and in AWQ's layout


class OfFiles:
    """Belongs to a QuantizationConfig: reads the shapes of the files' tensors, and renames them for the model."""

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shapes: dict[str, Sizes] = {}  # by the tensor's whole name: some models rename "lm_head." with its dot

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        self.shapes = {name: tuple(of["shape"]) for name, of in stored.items() if "shape" in of}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]
        self.shapes = hf_to_vllm_mapper.apply_dict(self.shapes)

    def names_of(self, layer: Any, prefix: str) -> list[str]:
        """Returns the names of the layer's matrices in the files; of experts, those of the first one."""
        stem, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last)
        if isinstance(layer, RoutedExperts) or parts is None:
            return matrices_of(layer, prefix)
        return [f"{stem}.{part}" for part in parts]

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper()


class LayoutOfFiles(OfFiles, QuantizationConfig):
    """Files whose layers are packed in one layout, GPTQ's or AWQ's; bits and groups are those of the shapes."""

    def __init__(self, checkpoint_format: str, is_awq: bool = False) -> None:
        super().__init__()
        self.checkpoint_format, self.is_awq = checkpoint_format, is_awq

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        packings = with_one_group([self.packing_of(name) for name in self.names_of(layer, prefix)])
        packing = the_same(prefix, packings)
        return plain_method(layer) if packing is None else packed_method(layer, prefix, packing)

    def packing_of(self, name: str) -> Packing | None:
        """Returns None for a matrix that is not packed."""
        found = {part: self.shapes.get(f"{name}.{part}") for part in TENSORS}
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
        is_ordered = f"{name}.g_idx" in self.shapes
        return Packing("gptq", bits, group, False, is_ordered, self.checkpoint_format, self.is_awq)


def with_one_group(packings: list[Packing | None]) -> list[Packing | None]:
    """Gives matrices of one group the others' group size: a down projection may be as wide as the groups."""
    sizes = {each.group_size for each in packings if each is not None} - {-1}
    if len(sizes) != 1:
        return packings
    (size,) = sizes
    return [each and (replace(each, group_size=size) if each.group_size == -1 else each) for each in packings]
