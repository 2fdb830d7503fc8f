"""What the files of a quantised model hold, by vLLM's names. A layer with packed tensors is packed, whatever the lists
of a configuration say: published lists often use other names than vLLM does.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn_engines import packed
from torch_gdn_engines.packed import Sizes
from torch_gdn_engines.vllm.quantized_layers import matrices_of, packed_method, plain_method


class OfFiles(packed.Config):
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

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper()


class LayoutOfFiles(OfFiles, packed.LayoutConfig, QuantizationConfig):
    """Files whose layers are packed in one layout, GPTQ's or AWQ's; bits and groups are those of the shapes."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        packing = packed.packing_of_layer(self.layout, self.shapes, prefix, self.names_of(layer, prefix))
        return plain_method(layer) if packing is None else packed_method(layer, prefix, packing)
