"""Mixture of experts on mps, where vLLM has no kernel for it. No tensor is read on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

# Classes of vLLM that do what they are known for; LoRA puts others in their place.
ROUTERS = ("FusedTopKRouter",)
LINEARS = ("MergedColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear")


class SharedExpert(NamedTuple):
    """Matrices of an expert that every token goes through."""

    gate_proj: Tensor  # [IS, H]
    up_proj: Tensor
    down_proj: Tensor  # [H, IS]
    gate: Tensor | None  # [1, H], by which its weight is computed


def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared: SharedExpert | None = None
) -> Tensor:
    """x [T, H]; w13 [E, 2 I, H], gate above up; w2 [E, H, I]; topk_weights and topk_ids [T, topk]."""
    if shared is None:
        hidden, _ = torch.ops.gdn.moe_gate_up(x, w13, topk_ids)
        routed: Tensor = torch.ops.gdn.moe_down(hidden, w2, topk_weights, topk_ids)
        return routed
    hidden, shared_hidden = torch.ops.gdn.moe_gate_up(x, w13, topk_ids, shared.gate_proj, shared.up_proj)
    gate = None if shared.gate is None else linear(x, shared.gate)
    both: Tensor = torch.ops.gdn.moe_down(hidden, w2, topk_weights, topk_ids, shared_hidden, shared.down_proj, gate)
    return both


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, unused: Tensor, gating_output: Tensor, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """vLLM's router, which is a CUDA kernel. Only the shapes and dtypes of what it would fill are used."""
    weights, ids = torch.ops.gdn.moe_router(gating_output, topk_indices.shape[1], renormalize=renormalize)
    return weights, ids.to(topk_indices.dtype)


def with_shared_expert(theirs: Callable[..., Tensor], method: type) -> Callable[..., Tensor]:
    """A MoERunner's forward that gives the shared expert to the same ops as the routed ones, where it is a plain one.

    vLLM computes it apart and adds it, which takes 8 more launches. `method`: ours, whose layers are taken.
    """

    @functools.wraps(theirs)
    def forward(runner: Any, hidden_states: Tensor, router_logits: Tensor, *others: Any, **options: Any) -> Tensor:
        given = [*others, *options.values()]
        shared = shared_expert_of(runner, method) if all(each is None for each in given) else None
        if shared is None:
            return theirs(runner, hidden_states, router_logits, *others, **options)
        if runner.gate is not None:
            router_logits, _ = runner.gate(hidden_states)
        weights, ids = runner.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=runner.routed_experts.quant_method.topk_indices_dtype,
            input_ids=None,
        )
        layer = runner.routed_experts
        return fused_experts(hidden_states, layer.w13_weight, layer.w2_weight, weights, ids, shared)

    return forward


def shared_expert_of(runner: Any, method: type) -> SharedExpert | None:
    """None where vLLM computes it, or there is none. Looked up in each step: an adapter may wrap the layers."""
    shared = getattr(runner, "_shared_experts", None)
    config = runner.moe_config
    is_whole = all(getattr(config, f"{kind}_size") == 1 for kind in ("tp", "pcp", "dp", "ep", "sp"))
    is_plain = isinstance(runner.routed_experts.quant_method, method) and type(runner.router).__name__ in ROUTERS
    is_plain = is_plain and runner.routed_scaling_factor == 1.0 and not runner._fse_fuse_gate
    is_plain = is_plain and runner.routed_input_transform is None and runner.routed_output_transform is None
    if shared is None or not (is_whole and is_plain):
        return None
    layer = shared._layer
    if type(layer).__name__ != "Qwen2MoeMLP":
        return None
    gate = layer.expert_gate
    projections = [layer.gate_up_proj, layer.down_proj, *([] if gate is None else [gate])]
    if any(type(each).__name__ not in LINEARS or is_quantised(each) for each in projections):
        return None
    gate_proj, up_proj = layer.gate_up_proj.weight.chunk(2)
    return SharedExpert(gate_proj, up_proj, layer.down_proj.weight, None if gate is None else gate.weight)


def is_quantised(layer: Any) -> bool:
    return type(layer.quant_method).__name__ != "UnquantizedLinearMethod" or getattr(layer, "bias", None) is not None
