"""vLLM's layers on mps with packed weights, the configurations that choose them, and a loader.

A layer with packed tensors in the files is packed, whatever the lists of a configuration say: published lists often use
other names than vLLM does. Embeddings and heads are packed if the files have them so.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import BasevLLMParameter, GroupQuantScaleParameter, PackedvLLMParameter
from vllm.transformers_utils.config import get_safetensors_params_metadata

from torch_gdn.quantized.formats import Format, Stored
from torch_gdn_engines import packed_methods
from torch_gdn_engines.vllm import moe
from torch_gdn_engines.vllm.layers import TorchGdnFusedMoEMethod, check_experts
from torch_gdn_engines.vllm.rotary import TorchGdnSiluAndMul


@register_weight_loader_v2_supported_method
class PackedLinearMethod(packed_methods.Linear, LinearMethodBase):
    def parameter_of(self, stored: Stored, data: Tensor, attributes: dict[str, Any]) -> Parameter:
        dims = {"input_dim": 1 - stored.transposed, "output_dim": int(stored.transposed)}
        load = self.loading(stored, stored.name, attributes["weight_loader"], self.rows_of)
        options: dict[str, Any] = {"data": data, "weight_loader": load, **dims}
        if not stored.has_words:
            return GroupQuantScaleParameter(**options)
        packed_dim = dims["output_dim" if stored.rows == "word" else "input_dim"]
        return PackedvLLMParameter(**options, packed_dim=packed_dim, packed_factor=self.packing.per_word)

    def groups(self, order: Tensor) -> Parameter:
        return BasevLLMParameter(data=order, weight_loader=self.load_groups)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return embed_tokens


class PackedExpertsMethod(packed_methods.Experts, FusedMoEMethodBase):
    is_monolithic = False

    def __init__(self, form: Format, name: str, matrices: packed_methods.Matrices, config: Any) -> None:
        FusedMoEMethodBase.__init__(self, config)
        check_experts(config)
        packed_methods.Experts.__init__(self, form, name, matrices)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    apply = moe.routed_experts


@functools.cache
def classes_of_experts() -> moe.Classes:
    """Returns the classes of a mixture of experts on mps. Called when a model exists, because it imports one."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

    return moe.Classes(
        experts=(TorchGdnFusedMoEMethod, PackedExpertsMethod),
        unquantized=(UnquantizedLinearMethod,),
        packed=(PackedLinearMethod,),
        routers=(FusedTopKRouter,),
        shared=(Qwen2MoeMLP,),
        linears=(MergedColumnParallelLinear, RowParallelLinear, ReplicatedLinear),
        activations=(SiluAndMul, TorchGdnSiluAndMul),
    ).learnt()


def plain_method(layer: Any) -> Any:
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


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
        if isinstance(layer, RoutedExperts):
            projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            return [f"{prefix}.0.{each}" for each in projections if each is not None]
        stem, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last)
        return [prefix] if parts is None else [f"{stem}.{part}" for part in parts]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding, RoutedExperts)):
            return None
        matrices = self.format.matrices(prefix, self.names_of(layer, prefix), self.shapes)
        if not matrices:
            return plain_method(layer)
        if isinstance(layer, RoutedExperts):
            return PackedExpertsMethod(self.format, prefix, matrices, layer.moe_config)
        return PackedLinearMethod(self.format, prefix, matrices)


class PackedLoader(DefaultModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def configuration(self, model_config: Any) -> Any:
        """Returns the configuration anew, by the files' names. It is None for a drafter that is not quantised."""
        return VllmConfig.get_quantization_config(model_config, self.load_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        config = self.configuration(model_config)
        if config is not None:
            if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is not None:
                config.apply_vllm_mapper(mapper.get_rename_mapper())
            pack_embeddings(model, config)
        super().load_weights(model, model_config)


def pack_embeddings(model: Any, config: Any) -> None:
    """Packs embedding and head, which vLLM makes for some models without the configuration. A head may be tied."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)}
    for name, layer in layers.items():
        if model.get_submodule(name) is not layer or isinstance(layer.quant_method, PackedLinearMethod):
            continue
        method = config.get_quant_method(layer, name)
        if not isinstance(method, PackedLinearMethod):
            continue
        plain = layer.weight
        del layer.weight
        layer.quant_method = method
        with plain.device:
            method.create_weights(
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
