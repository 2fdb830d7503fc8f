"""Loads quantised checkpoints on mps: vLLM's configurations of the published formats, with torch_gdn's layers.

A configuration says which format the files have, and the files which layers are packed. A format without kernels in
torch_gdn is refused when the configuration is read or the layer is made.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.models.utils import WeightsMapper

from torch_gdn_engines import packed
from torch_gdn_engines.packed import Packing, refusal, the_same
from torch_gdn_engines.vllm import mlx_files, moe, packed_loader
from torch_gdn_engines.vllm.quantized_layers import classes_of_experts, matrices_of, packed_method, plain_method
from torch_gdn_engines.vllm.stored_layers import LayoutOfFiles, OfFiles


class PackedCompressedTensorsConfig(OfFiles, CompressedTensorsConfig):
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
        is_stored = the_same(prefix, [f"{name}.weight_packed" in self.shapes for name in self.names_of(layer, prefix)])
        if not scheme or scheme.get("weights") is None:
            if is_stored:
                raise ValueError(
                    f"{prefix}: expected a layer of config_groups, because the files have it packed, got none"
                )
            return plain_method(layer)
        weights = scheme["weights"]
        activations = [scheme.get("input_activations"), scheme.get("output_activations")]
        is_packed = weights.type == "int" and scheme["format"] == "pack-quantized"
        if not is_packed or weights.strategy not in ("group", "channel") or weights.dynamic or any(activations):
            kind = f"{weights.num_bits}-bit {weights.type!s} weights by {weights.strategy}"
            also = " and quantised activations" if any(activations) else ""
            raise refusal(f"{prefix} in compressed-tensors' {scheme['format']} with {kind}{also}")
        if not is_stored:
            return plain_method(layer)
        for name in self.names_of(layer, prefix):
            packed.refuse_order_of_compressed_tensors(self.shapes, name)
        group = weights.group_size if weights.strategy == "group" else -1
        return packed_method(
            layer, prefix, Packing("compressed-tensors", weights.num_bits, group, is_symmetric=weights.symmetric)
        )


class PackedGPTQConfig(LayoutOfFiles):
    method, read = "auto_gptq", staticmethod(packed.gptq)


class PackedAWQConfig(LayoutOfFiles):
    method, read = "auto_awq", staticmethod(packed.awq)


class PackedAutoRoundConfig(LayoutOfFiles):
    method, read = "inc", staticmethod(packed.auto_round)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> Any:
        return "inc" if hf_quant_cfg.get("quant_method") == "auto-round" else None


CONFIGURATIONS: dict[str, type] = {
    "compressed-tensors": PackedCompressedTensorsConfig,
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), PackedGPTQConfig),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), PackedAWQConfig),
    "inc": PackedAutoRoundConfig,
    "mlx": mlx_files.PackedMLXConfig,
}


LOADERS = {"torch_gdn_packed": packed_loader.PackedLoader, "torch_gdn_mlx": mlx_files.MLXLoader}


def load_format_of(method: str | None, asked: str) -> str:
    """Returns the load_format for a model: vLLM makes some heads without asking the configuration for their method."""
    if method == "mlx":
        return "torch_gdn_mlx"
    return "torch_gdn_packed" if method in CONFIGURATIONS and asked in ("auto", "safetensors") else asked


def verify(method: str) -> None:
    if method not in CONFIGURATIONS:
        raise refusal(method)


def register() -> None:
    for name, configuration in CONFIGURATIONS.items():
        register_quantization_config(name)(configuration)
    for load_format, loader in LOADERS.items():
        register_model_loader(load_format)(loader)
    MoERunner.forward = moe.with_shared_expert(MoERunner.forward, classes_of_experts)
