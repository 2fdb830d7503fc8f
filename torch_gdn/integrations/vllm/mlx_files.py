"""Reads MLX's quantised files, as mlx-lm writes them: the configuration, and a loader for vLLM's models.

mlx-lm stores a layer's experts in one tensor and convolutions as [channels, taps, 1]. For models with convolutions it
adds one to the norms' weights. A module is packed if the files have scales for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import is_layer_gptq_quantized
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn import quantized
from torch_gdn.integrations.vllm.quantized_layers import (
    DTYPES,
    PackedLinearMethod,
    Packing,
    matrices_of,
    packed_method,
    plain_method,
    refusal,
    the_same,
)
from torch_gdn.quantized.mlx import NORMS_PLUS_ONE

LOAD_FORMAT = "torch_gdn_mlx"
MODELS = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # others may be changed in other ways
NUMBERS = re.compile(r"\.(gate|shared_expert_gate)$")  # modules to dequantise: vLLM makes most of them plain


def name_of(stored: str) -> str:
    """Returns a tensor's or module's name in vLLM. For the experts' tensor it is the first expert's name."""
    return re.sub(r"^language_model\.", "", stored).replace(".switch_mlp.", ".experts.0.")


class PackedMLXConfig(QuantizationConfig):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.bits, self.group_size = config["bits"], config["group_size"]
        self.own = {name_of(name): own for name, own in config.items() if isinstance(own, dict)}
        self.packed_modules: list[str] = []
        self.is_tied = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedMLXConfig:
        if config.get("mode", "affine") != "affine":
            raise refusal(f"MLX's mode {config['mode']}")
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Recognises MLX's files, which name no method."""
        is_mlx = not hf_quant_cfg.get("quant_method") and {"bits", "group_size"} <= hf_quant_cfg.keys()
        return "mlx" if is_mlx else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        kind = hf_config.model_type.removesuffix("_text")
        if kind not in MODELS or getattr(hf_config, "vision_config", None) is not None:
            raise refusal(f"an MLX file of {kind} (supported text models: {', '.join(MODELS)})")
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        self.packed_modules = [name_of(name.removesuffix(".scales")) for name in stored if name.endswith(".scales")]
        self.is_tied = not any(name_of(name).startswith("lm_head.") for name in stored)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.packed_modules = hf_to_vllm_mapper.apply_list(self.packed_modules)
        self.own = hf_to_vllm_mapper.apply_dict(self.own)

    def get_name(self) -> Any:
        return "mlx"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        names, fused = matrices_of(layer, prefix), self.packed_modules_mapping
        if isinstance(layer, ParallelLMHead) and self.is_tied:
            names = ["model.embed_tokens"]
        are_packed = [is_layer_gptq_quantized(name, self.packed_modules, fused) for name in names]
        if NUMBERS.search(prefix) or not the_same(prefix, are_packed):
            return plain_method(layer)
        stem, _, last = prefix.rpartition(".")
        if last in fused:
            names = [f"{stem}.{part}" for part in fused[last]]
        bits, group = the_same(prefix, [self.packing_of(name) for name in names])
        return packed_method(layer, prefix, Packing("mlx", bits, group))

    def packing_of(self, name: str) -> tuple[int, int]:
        own = self.own.get(name, {})
        return own.get("bits", self.bits), own.get("group_size", self.group_size)


class MLXLoader(DefaultModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_weights(self, model: Any, model_config: Any) -> None:
        pack_embeddings(model, config_of(model_config))
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        stored = get_safetensors_params_metadata(model_config.model, revision=model_config.revision)
        has_shifted_norms = any(name.endswith(".conv1d.weight") and of["shape"][-1] == 1 for name, of in stored.items())
        return tensors_of_models(
            super().get_all_weights(model_config, model), config_of(model_config), has_shifted_norms
        )


def config_of(model_config: Any) -> PackedMLXConfig:
    config = PackedMLXConfig.from_config(model_config.model_arch_config.quantization_config)
    config.maybe_update_config(model_config.model, model_config.hf_config, model_config.revision)
    return config


def pack_embeddings(model: Any, config: PackedMLXConfig) -> None:
    """Packs embedding and head, which vLLM makes for some models without the configuration. A head may be tied."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)}
    for name, layer in layers.items():
        if name not in config.packed_modules or isinstance(layer.quant_method, PackedLinearMethod):
            continue
        plain = layer.weight
        del layer.weight
        layer.quant_method = packed_method(layer, name, Packing("mlx", *config.packing_of(name)))
        with plain.device:
            layer.quant_method.create_weights(
                layer,
                layer.input_size_per_partition,
                layer.output_partition_sizes,
                layer.input_size,
                layer.output_size,
                layer.params_dtype,
                weight_loader=layer.weight_loader,
            )
        for other, head in layers.items():
            if getattr(head, "weight", None) is plain:
                owner, _, attribute = other.rpartition(".")
                setattr(model.get_submodule(owner), attribute, layer)


def tensors_of_models(
    stored: Iterable[tuple[str, Tensor]], config: PackedMLXConfig, has_shifted_norms: bool
) -> Iterator[tuple[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}  # of modules to dequantise
    for name, tensor in stored:
        module, _, part = name_of(name).rpartition(".")
        if tensor.dtype == torch.uint32:
            tensor = tensor.view(torch.int32)
        if NUMBERS.search(module) and module not in parts and tensor.is_floating_point() and part == "weight":
            yield f"{module}.weight", tensor
        elif NUMBERS.search(module):
            parts.setdefault(module, {})[part] = tensor
            if len(parts[module]) == 3:
                bits, _ = config.packing_of(module)
                yield f"{module}.weight", quantized.from_mlx(**parts.pop(module), bits=bits).dequantize()
        elif ".switch_mlp." in name:
            for expert, own in enumerate(tensor):
                yield f"{module.replace('.experts.0.', f'.experts.{expert}.')}.{part}", own
        elif module.endswith(".conv1d") and tensor.shape[-1] == 1:
            yield f"{module}.{part}", tensor.mT
        elif has_shifted_norms and name.endswith(NORMS_PLUS_ONE):
            yield f"{module}.{part}", tensor.float() - 1
        else:
            yield f"{module}.{part}", tensor
