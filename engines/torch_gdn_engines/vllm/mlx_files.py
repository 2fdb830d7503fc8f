"""Reads MLX's quantised files, as mlx-lm writes them: the configuration, and a loader for vLLM's models.

mlx-lm stores a layer's experts in one tensor and convolutions as [channels, taps, 1]. For models with convolutions it
adds one to the norms' weights. A module is packed if the files have scales for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from torch_gdn import quantized
from torch_gdn.quantized.mlx import NORMS_PLUS_ONE, VISION
from torch_gdn_engines.packed import Packing, refusal, the_same
from torch_gdn_engines.vllm.packed_loader import PackedLoader
from torch_gdn_engines.vllm.quantized_layers import packed_method, plain_method
from torch_gdn_engines.vllm.stored_layers import OfFiles

MODELS = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # others may be changed in other ways
TEXT_PARTS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}  # of models with a vision part
NUMBERS = re.compile(r"\.(gate|shared_expert_gate)$")  # modules to dequantise: vLLM makes most of them plain


def name_of(stored: str) -> str:
    """Returns a tensor's or module's name in vLLM. For the experts' tensor it is the first expert's name."""
    return re.sub(r"^language_model\.", "", stored).replace(".switch_mlp.", ".experts.0.")


class PackedMLXConfig(OfFiles, QuantizationConfig):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.bits, self.group_size = config["bits"], config["group_size"]
        # A dot ends the names: some models rename "lm_head." with it.
        self.own = {f"{name_of(name)}.": own for name, own in config.items() if isinstance(own, dict)}
        self.is_tied = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedMLXConfig:
        if config.get("mode", "affine") != "affine":
            raise refusal(f"MLX's mode {config['mode']}")
        if lacking := {"bits", "group_size"} - config.keys():
            raise refusal(f"MLX's configuration without {' and '.join(sorted(lacking))}")
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
        if kind not in MODELS:
            raise refusal(f"an MLX file of {kind} (supported text models: {', '.join(MODELS)})")
        text, sees = TEXT_PARTS.get(kind), getattr(hf_config, "vision_config", None) is not None
        if sees and getattr(hf_config, "architectures", None) != [text]:
            option = f'--hf-overrides \'{{"architectures": ["{text}"]}}\''
            raise refusal(f"an MLX file of {kind} with a vision part; its text part runs with {option}")
        super().maybe_update_config(model_name, hf_config, revision)
        self.shapes = {name_of(name): shape for name, shape in self.shapes.items()}
        self.is_tied = not any(name.startswith("lm_head.") for name in self.shapes)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.own = hf_to_vllm_mapper.apply_dict(self.own)

    def get_name(self) -> Any:
        return "mlx"

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        names = self.names_of(layer, prefix)
        if isinstance(layer, ParallelLMHead) and self.is_tied:
            names = ["model.embed_tokens"]
        is_packed = the_same(prefix, [f"{name}.scales" in self.shapes for name in names])
        if NUMBERS.search(prefix) or not is_packed:
            return plain_method(layer)
        bits, group = the_same(prefix, [self.packing_of(name) for name in names])
        return packed_method(layer, prefix, Packing("mlx", bits, group))

    def packing_of(self, name: str) -> tuple[int, int]:
        own = self.own.get(f"{name}.", {})
        return own.get("bits", self.bits), own.get("group_size", self.group_size)


class MLXLoader(PackedLoader):
    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        config = self.configuration(model_config)
        has_shifted_norms = any(
            name.endswith(".conv1d.weight") and shape[-1] == 1 for name, shape in config.shapes.items()
        )
        return tensors_of_models(super().get_all_weights(model_config, model), config, has_shifted_norms)


def tensors_of_models(
    stored: Iterable[tuple[str, Tensor]], config: PackedMLXConfig, has_shifted_norms: bool
) -> Iterator[tuple[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}  # of modules to dequantise
    for name, tensor in stored:
        if name.startswith(VISION):
            continue
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
