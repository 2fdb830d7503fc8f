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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torch_gdn.quantized import mlx
from torch_gdn.quantized.formats import refusal
from torch_gdn_engines.vllm.quantized_layers import PackedConfig, PackedLoader, plain_method

MODELS = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # others may be changed in other ways
TEXT_PARTS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}  # of models with a vision part
GATE = re.compile(r"\.(gate|shared_expert_gate)$")  # dequantised, because vLLM makes most of them plain


def name_of(stored: str) -> str:
    """Returns a tensor's or module's name in vLLM. For the experts' tensor it is the first expert's name."""
    return re.sub(r"^language_model\.", "", stored).replace(".switch_mlp.", ".experts.0.")


class PackedMLXConfig(PackedConfig):
    method, read = "mlx", staticmethod(mlx.read)
    is_tied = False

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return "mlx" if mlx.is_mlx(hf_quant_cfg) else None

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

    def names_of(self, layer: Any, prefix: str) -> list[str]:
        is_head = isinstance(layer, ParallelLMHead) and self.is_tied
        return ["model.embed_tokens"] if is_head else super().names_of(layer, prefix)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return plain_method(layer) if GATE.search(prefix) else super().get_quant_method(layer, prefix)


class MLXLoader(PackedLoader):
    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        config, columns = self.configuration(model_config), model_config.hf_text_config.hidden_size
        return tensors_of_models(super().get_all_weights(model_config, model), config, columns)


def tensors_of_models(
    stored: Iterable[tuple[str, Tensor]], config: PackedMLXConfig, hidden_size: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields the files' tensors as vLLM's models want them."""
    has_shifted_norms = mlx.shifts_norms(config.shapes)
    gates: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored:
        if name.startswith(mlx.VISION):
            continue
        module, _, part = name_of(name).rpartition(".")
        if tensor.dtype == torch.uint32:
            tensor = tensor.view(torch.int32)
        if GATE.search(module) and f"{module}.scales" in config.shapes:
            tensors = gates.setdefault(module, {})
            tensors[part] = tensor
            if len(tensors) == len(config.format.tensors_of(module, config.shapes)):
                shapes = {part: tuple(x.shape) for part, x in gates.pop(module).items()}
                bits = config.format.packing(module, shapes, hidden_size).bits
                yield f"{module}.weight", config.format.convert(**tensors, bits=bits).dequantize()
        elif ".switch_mlp." in name:
            for expert, own in enumerate(tensor):
                yield f"{module.replace('.experts.0.', f'.experts.{expert}.')}.{part}", own
        elif module.endswith(".conv1d") and tensor.shape[-1] == 1:
            yield f"{module}.{part}", tensor.mT
        elif has_shifted_norms and name.endswith(mlx.NORMS_PLUS_ONE):
            yield f"{module}.{part}", tensor.float() - 1
        else:
            yield f"{module}.{part}", tensor
