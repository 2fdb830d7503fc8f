"""vLLM's layers on mps with packed weights."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn import Parameter
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
from vllm.model_executor.parameter import BasevLLMParameter, GroupQuantScaleParameter, PackedvLLMParameter

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


# Helpers for the configurations of all formats.


def packed_method(layer: Any, form: Format, name: str, matrices: packed_methods.Matrices) -> Any:
    if isinstance(layer, RoutedExperts):
        return PackedExpertsMethod(form, name, matrices, layer.moe_config)
    return PackedLinearMethod(form, name, matrices)


def plain_method(layer: Any) -> Any:
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def matrices_of(layer: Any, name: str) -> list[str]:
    """Returns the names that a configuration may use for the layer. For experts they are the first one's matrices."""
    if not isinstance(layer, RoutedExperts):
        return [name]
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [f"{name}.0.{each}" for each in projections if each is not None]
