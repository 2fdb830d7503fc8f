"""Runs vLLM's Gated DeltaNet layers by `gated_delta_net.forward`, their norms, and on mps all norms and experts.

vLLM instantiates these in place of its own classes, by name: PluggableLayer.register_oot and CustomOp.register_oot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

import torch_gdn
from torch_gdn.integrations import plain
from torch_gdn_engines.vllm import gated_delta_net, moe


def state_of(layer: Any) -> gated_delta_net.LayerState:
    """Built at a layer's first step, and again once vLLM has bound other pools to it."""
    known: gated_delta_net.LayerState | None = getattr(layer, "torch_gdn_state", None)
    if known is None or known.state_pool is not layer.kv_cache[1]:
        known = layer.torch_gdn_state = build_state(layer)
    return known


def build_state(layer: Any) -> gated_delta_net.LayerState:
    conv_pool, state_pool = layer.kv_cache[0], layer.kv_cache[1]
    # vLLM's CPU loader packs the weight in place for its own kernel and also keeps the original.
    packed = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return gated_delta_net.LayerState(
        key_heads=layer.num_k_heads // layer.tp_size,
        value_heads=layer.num_v_heads // layer.tp_size,
        key_size=layer.head_k_dim,
        value_size=layer.head_v_dim,
        conv_weight=layer.conv1d.weight.flatten(1) if packed is None else packed,
        conv_bias=layer.conv1d.bias,
        activation=layer.activation,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        conv_pool=conv_pool if is_conv_state_dim_first() else conv_pool.transpose(-1, -2),
        state_pool=state_pool,
        norm=norm_of(layer),
    )


def norm_of(layer: Any) -> dict[str, Any] | None:
    """Returns what `gdn_decode_` takes of the layer's gated norm, or None if it does not compute that norm."""
    norm = getattr(layer, "norm", None)
    if type(norm) is not TorchGdnRMSNormGated or norm.group_size is not None or not norm.norm_before_gate:
        return None
    return {"norm_weight": norm.weight, "norm_activation": norm.activation, "norm_eps": norm.eps}


def run(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    metadata = get_forward_context().attn_metadata
    metadata = metadata.get(layer.prefix) if isinstance(metadata, dict) else None
    if metadata is None:  # a profiling run, before there are pools
        out.zero_()
        return
    gated_delta_net.forward(state_of(layer), metadata, mixed_qkv, b, a, out)


def decode(layer: Any, mixed_qkvz: Tensor, ba: Tensor) -> Tensor | None:
    """Computes the normed outputs of a batch without prompts in two launches, or returns None for any other batch.

    It runs only on mps: vLLM compiles nothing there, so no custom op is needed around the pools.
    """
    metadata = get_forward_context().attn_metadata
    metadata = metadata.get(layer.prefix) if isinstance(metadata, dict) else None
    if metadata is None or not current_platform.is_out_of_tree() or torch.compiler.is_compiling():
        return None
    if plain.change_of(layer.norm, (TorchGdnRMSNormGated,)):
        return None
    if layer.gqa_interleaved_layout:
        return gated_delta_net.decode(state_of(layer), metadata, mixed_qkvz, None, ba, None)
    D = mixed_qkvz.shape[1] - layer.value_dim // layer.tp_size
    return gated_delta_net.decode(state_of(layer), metadata, mixed_qkvz[:, :D], mixed_qkvz[:, D:], *layer.split_ba(ba))


def gated_delta_net_core(mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, layer_name: LayerNameType) -> None:
    run(get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)], mixed_qkv, b, a, out)


def gated_delta_net_core_fake(mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, layer_name: LayerNameType) -> None:
    return None


class TorchGdnQwenAttention(QwenGatedDeltaNetAttention):
    """The layer of Qwen3-Next, with projections by key head, and of Qwen3.5, with one projection after the other."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if (normed := decode(self, mixed_qkvz, ba)) is not None:
            output, _ = self.out_proj(normed.flatten(1))
            return output
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, ba)
            mixed_qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=-1)
        else:
            columns = [(2 * self.key_dim + self.value_dim) // self.tp_size, self.value_dim // self.tp_size]
            mixed_qkv, z = mixed_qkvz.split(columns, dim=-1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = self.split_ba(ba)
        out = hidden_states.new_empty(hidden_states.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        torch.ops.vllm.torch_gdn_core(mixed_qkv, b, a, out, _encode_layer_name(self.prefix))
        return self._output_projection(out, z)


class TorchGdnOlmoHybridAttention(OlmoHybridGatedDeltaNetAttention):
    """OLMo-Hybrid's layer. vLLM puts all of it, projections included, in a custom op, which calls `_forward_core`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        load = self.conv1d.weight.weight_loader

        def weight_loader(parameter: Tensor, loaded: Tensor, shard: int | None = None) -> None:
            """Loads q, k or v of the fused weight. vLLM names it on the tensor, where its loader does not look."""
            load(parameter, loaded, getattr(loaded, "shard_id", shard))

        self.conv1d.weight.weight_loader = weight_loader

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        run(self, mixed_qkv, b, a, core_attn_out)


class TorchGdnRMSNormGated(RMSNormGated):
    def forward_native(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None or self.group_size is not None or not self.norm_before_gate:
            return super().forward_native(x, z)
        return torch.ops.gdn.rms_norm_gated(x, z, self.weight, self.activation, self.eps)

    forward_cpu = forward_oot = forward_native


def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, **options: bool
) -> Tensor | tuple[Tensor, Tensor]:
    y, h = torch.ops.gdn.rms_norm(x, weight, residual, eps, **options)
    return y if residual is None else (y, h)


def has_gated_delta_net() -> bool:
    """Returns whether the model under construction has Gated DeltaNet layers."""
    config = get_current_vllm_config()
    return config.model_config is not None and hasattr(config.model_config.hf_text_config, "linear_num_value_heads")


class ReplacedNorm(CustomOp):
    """A norm in one kernel. Without compilation, vLLM's norms run PyTorch's operations one by one.

    On vLLM's CPU platform only models with Gated DeltaNet layers use them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_replaced = current_platform.is_out_of_tree() or has_gated_delta_net()

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return self.forward_oot(x, residual) if self.is_replaced else self.forward_native(x, residual)


class TorchGdnRMSNorm(ReplacedNorm, RMSNorm):
    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        has_other_dtype = self.weight.dtype not in (x.dtype, torch.float32)
        if self.variance_size_override is not None or has_other_dtype:
            return self.forward_native(x, residual)
        weight = self.weight if self.has_weight else None
        return normalise(x, residual, weight, self.variance_epsilon, round_norm=self.weight.dtype == x.dtype)


class TorchGdnGemmaRMSNorm(ReplacedNorm, GemmaRMSNorm):
    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return normalise(x, residual, self.weight, self.variance_epsilon, zero_centered=True)


def check_experts(config: Any) -> None:
    if config.activation != MoEActivation.SILU or config.has_bias:
        got = f"{config.activation.value}, has_bias={config.has_bias}"
        raise NotImplementedError(f"experts on mps: expected silu without biases, got {got}")
    if get_current_vllm_config().lora_config is not None:
        raise NotImplementedError("LoRA on mps: expected a model without experts, got one with experts")


class TorchGdnFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Computes a layer's experts. vLLM leaves this to a platform that is not its own."""

    is_monolithic = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_experts(config)

    forward_oot = moe.routed_experts


def register() -> None:
    assert torch_gdn  # defines torch.ops.gdn
    plain.learn(TorchGdnRMSNormGated)
    direct_register_custom_op("torch_gdn_core", gated_delta_net_core, ["out"], gated_delta_net_core_fake)
    QwenGatedDeltaNetAttention.register_oot(TorchGdnQwenAttention)
    OlmoHybridGatedDeltaNetAttention.register_oot(TorchGdnOlmoHybridAttention)
    RMSNormGated.register_oot(TorchGdnRMSNormGated)
    RMSNorm.register_oot(TorchGdnRMSNorm)
    GemmaRMSNorm.register_oot(TorchGdnGemmaRMSNorm)
    if current_platform.is_out_of_tree():
        UnquantizedFusedMoEMethod.register_oot(TorchGdnFusedMoEMethod)
