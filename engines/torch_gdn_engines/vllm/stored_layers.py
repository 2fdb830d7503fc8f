"""Configurations of quantised files for vLLM on mps. A layer with packed tensors in the files is packed, whatever the
lists of a configuration say: published lists often use other names than vLLM does.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn_engines import packed_methods
from torch_gdn_engines.vllm.quantized_layers import matrices_of, packed_method, plain_method


class PackedConfig(packed_methods.Config, QuantizationConfig):
    """Reads the shapes of the files' tensors by their whole names: some models rename "lm_head." with its dot."""

    packed_modules_mapping: dict[str, list[str]]

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        shapes = {name: tuple(tensor["shape"]) for name, tensor in stored.items() if "shape" in tensor}
        self.shapes = self.format.by_expert(shapes)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.shapes = hf_to_vllm_mapper.apply_dict(self.shapes)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops the tensors that say nothing new."""
        return WeightsMapper(orig_to_new_suffix={f".{name}": None for name in self.format.ignored})

    def names_of(self, layer: Any, prefix: str) -> list[str]:
        """Returns the names of the layer's matrices in the files; of experts, those of the first one."""
        stem, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last)
        if isinstance(layer, RoutedExperts) or parts is None:
            return matrices_of(layer, prefix)
        return [f"{stem}.{part}" for part in parts]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        matrices = self.format.matrices(prefix, self.names_of(layer, prefix), self.shapes)
        return packed_method(layer, self.format, prefix, matrices) if matrices else plain_method(layer)
