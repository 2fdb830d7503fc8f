"""Loads quantised checkpoints on mps: vLLM's configurations of the published formats, with torch_gdn's layers.

A configuration says for each layer how the checkpoint packs it, if it does. A format without kernels in torch_gdn is
refused when the configuration is read or the layer is made.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.inc.inc import INCConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    get_dynamic_override,
    is_layer_gptq_quantized,
    override_config,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.scalar_type import scalar_types
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn.integrations.vllm import mlx_files
from torch_gdn.integrations.vllm.quantized_layers import (
    DTYPES,
    Packing,
    matrices_of,
    packed_method,
    plain_method,
    refusal,
    the_same,
)


class PackedCompressedTensorsConfig(CompressedTensorsConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedCompressedTensorsConfig:
        ours: PackedCompressedTensorsConfig = super().from_config(config)
        for what in ("transform_config", "kv_cache_scheme"):
            if getattr(ours, what):
                raise refusal(f"compressed-tensors with a {what}")
        return ours

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Drops the tensors of the unpacked shapes, which the model already knows."""
        return WeightsMapper(orig_to_new_suffix={".g_idx": None, ".weight_g_idx": None, ".weight_shape": None})

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
        scheme = the_same(prefix, [self.get_scheme_dict(layer, name) for name in matrices_of(layer, prefix)])
        if not scheme or scheme.get("weights") is None:
            return plain_method(layer)
        weights = scheme["weights"]
        activations = [scheme.get("input_activations"), scheme.get("output_activations")]
        is_packed = weights.type == "int" and scheme["format"] == "pack-quantized"
        if not is_packed or weights.strategy not in ("group", "channel") or weights.dynamic or any(activations):
            kind = f"{weights.num_bits}-bit {weights.type!s} weights by {weights.strategy}"
            also = " and quantised activations" if any(activations) else ""
            raise refusal(f"{prefix} in compressed-tensors' {scheme['format']} with {kind}{also}")
        group = weights.group_size if weights.strategy == "group" else -1
        return packed_method(
            layer, prefix, Packing("compressed-tensors", weights.num_bits, group, is_symmetric=weights.symmetric)
        )


class PackedGPTQConfig(AutoGPTQConfig):
    TYPE_MAP: ClassVar[dict[tuple[int, bool], Any]] = {
        (4, True): scalar_types.uint4b8,
        (4, False): scalar_types.uint4,
        (8, True): scalar_types.uint8b128,
        (8, False): scalar_types.uint8,
    }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedGPTQConfig:
        written = config.get("checkpoint_format") or "gptq"
        if config.get("bits") not in (4, 8) or written not in ("gptq", "gptq_v2"):
            raise refusal(f"GPTQ with {config.get('bits')} bits in the format {written}")
        ours: PackedGPTQConfig = super().from_config({**config, "desc_act": False})  # vLLM refuses True
        ours.desc_act = bool(config.get("desc_act")) and ours.group_size != -1
        ours.checkpoint_format = written
        return ours

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        return WeightsMapper() if self.desc_act else super().get_checkpoint_weight_mapper()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        is_head = isinstance(layer, ParallelLMHead) and self.lm_head_quantized
        if not (is_head or isinstance(layer, (LinearBase, RoutedExperts))):
            return None
        listed, fused = self.modules_in_block_to_quantize, self.packed_modules_mapping
        names = matrices_of(layer, prefix)
        is_quantised = the_same(prefix, [is_layer_gptq_quantized(name, listed, fused) for name in names])
        if not is_quantised or get_dynamic_override(self, prefix) is False:
            return plain_method(layer)
        own = copy.copy(self)
        override_config(own, prefix)
        packing = Packing(
            "gptq",
            own.weight_bits,
            own.group_size,
            is_ordered=own.desc_act,
            checkpoint_format=self.checkpoint_format,
        )
        return packed_method(layer, prefix, packing)


class PackedAWQConfig(AutoAWQConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedAWQConfig:
        bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or not config.get("zero_point"):
            raise refusal(f"AWQ with {bits} bits in version {version} with zero_point {config.get('zero_point')}")
        ours: PackedAWQConfig = super().from_config(config)
        return ours

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads from the files which modules are packed, because modules_to_not_convert also matches longer names."""
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        self.packed_modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.packed_modules = hf_to_vllm_mapper.apply_list(self.packed_modules)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        is_head = isinstance(layer, ParallelLMHead) and self.lm_head_quantized
        if not (is_head or isinstance(layer, (LinearBase, RoutedExperts))):
            return None
        names, fused = matrices_of(layer, prefix), self.packed_modules_mapping
        if not the_same(prefix, [is_layer_gptq_quantized(name, self.packed_modules, fused) for name in names]):
            return plain_method(layer)
        return packed_method(layer, prefix, Packing("awq", self.weight_bits, self.group_size))


class PackedAutoRoundConfig(INCConfig):
    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return DTYPES

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return None
        names = matrices_of(layer, prefix)
        if isinstance(layer, RoutedExperts):
            names += [name for name in self.extra_config or () if name.startswith(f"{prefix}.")]
        found = the_same(prefix, [self.config_parser.resolve(layer, name) for name in names])
        if not found.quantized:
            return plain_method(layer)
        layout = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}.get(found.packing_format)
        if layout is None or found.data_type != "int" or found.bits not in ((4, 8) if layout == "gptq" else (4,)):
            raise refusal(f"{prefix} by AutoRound as {found.data_type} of {found.bits} bits in {found.packing_format}")
        return packed_method(layer, prefix, Packing(layout, found.bits, found.group_size))


CONFIGURATIONS: dict[str, type] = {
    "compressed-tensors": PackedCompressedTensorsConfig,
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), PackedGPTQConfig),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), PackedAWQConfig),
    "inc": PackedAutoRoundConfig,
    "mlx": mlx_files.PackedMLXConfig,
}


def verify(method: str) -> None:
    if method not in CONFIGURATIONS:
        raise refusal(method)


def register() -> None:
    for name, configuration in CONFIGURATIONS.items():
        register_quantization_config(name)(configuration)
    register_model_loader(mlx_files.LOAD_FORMAT)(mlx_files.MLXLoader)
