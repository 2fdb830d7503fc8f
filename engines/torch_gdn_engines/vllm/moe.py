"""Runs mixtures of experts on mps, where vLLM has no kernel for them. No tensor is read on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_gdn.integrations import plain
from torch_gdn.integrations.experts import Matrix, SharedExpert, fused_experts, matrix_in


class Classes(NamedTuple):
    """The classes of layers and methods that the ops can stand in for. LoRA replaces them by others."""

    experts: tuple[type, ...]  # methods of routed experts
    unquantized: tuple[type, ...]  # methods of linear layers
    packed: tuple[type, ...]
    routers: tuple[type, ...]
    shared: tuple[type, ...]
    linears: tuple[type, ...]
    activations: tuple[type, ...]

    def learnt(self) -> Classes:
        """Returns itself, once `plain.change_of` knows the modules among them."""
        for owner in (*self.shared, *self.linears, *self.activations):
            plain.learn(owner)
        return self


def experts_of(layer: Any) -> tuple[Matrix, Matrix]:
    """Returns w13 and w2 of a vLLM layer."""
    return matrix_in(layer, "w13_weight", "w13_"), matrix_in(layer, "w2_weight", "w2_")


def routed_experts(
    method: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any = None,
    shared_experts_input: Tensor | None = None,
) -> Tensor:
    """Runs layers that `with_shared_expert` does not take. vLLM adds their shared experts itself."""
    return fused_experts(x, *experts_of(layer), topk_weights, topk_ids)


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, unused: Tensor, gating_output: Tensor, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Replaces vLLM's router, a CUDA kernel. Reads only the shapes and dtypes of the outputs that it would fill."""
    weights, ids = torch.ops.gdn.moe_router(gating_output, topk_indices.shape[1], renormalize=renormalize)
    return weights, ids.to(topk_indices.dtype)


def with_shared_expert(theirs: Callable[..., Tensor], classes: Callable[[], Classes]) -> Callable[..., Tensor]:
    """Wraps a MoERunner's forward, so that a plain shared expert goes to the same ops as the routed experts.

    vLLM computes it separately and adds it, which takes 8 more launches. `classes` is called in each step.
    """

    @functools.wraps(theirs)
    def forward(runner: Any, hidden_states: Tensor, router_logits: Tensor, *others: Any, **options: Any) -> Tensor:
        given = [*others, *options.values()]
        shared = shared_expert_of(runner, classes()) if all(each is None for each in given) else None
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
        return fused_experts(hidden_states, *experts_of(runner.routed_experts), weights, ids, shared)

    return forward


def shared_expert_of(runner: Any, known: Classes) -> SharedExpert | None:
    """Returns None if vLLM computes it or there is none. Runs in each step, because an adapter may wrap the layers."""
    shared = getattr(runner, "_shared_experts", None)
    config = runner.moe_config
    is_whole = all(getattr(config, f"{kind}_size") == 1 for kind in ("tp", "pcp", "dp", "ep", "sp"))
    is_plain = type(runner.routed_experts.quant_method) in known.experts and type(runner.router) in known.routers
    is_plain = is_plain and runner.routed_scaling_factor == 1.0 and not runner._fse_fuse_gate
    is_plain = is_plain and runner.routed_input_transform is None and runner.routed_output_transform is None
    if shared is None or not (is_whole and is_plain):
        return None
    layer = shared._layer
    if plain.change_of(layer, known.shared) or plain.change_of(layer.act_fn, known.activations):
        return None
    gate_up, down = matrix_of(layer.gate_up_proj, known), matrix_of(layer.down_proj, known)
    has_gate = layer.expert_gate is not None
    gate = matrix_of(layer.expert_gate, known) if has_gate else None
    if (
        gate_up is None
        or down is None
        or not gate_up.has_halves()
        or (has_gate and (gate is None or gate.scales is not None))
    ):
        return None
    are_packed = experts_of(runner.routed_experts)[0].scales is not None
    if not are_packed and (gate_up.scales is not None or down.scales is not None):
        return None  # the ops take a packed shared expert only with packed experts
    gate_proj, up_proj = gate_up.halves()
    logit = None if gate is None else functools.partial(linear, weight=gate.weight)
    return SharedExpert(gate_proj, up_proj, down, logit)


def matrix_of(layer: Any, known: Classes) -> Matrix | None:
    """Returns a linear layer's matrix, or None if the layer does more than multiply by it."""
    if plain.change_of(layer, known.linears) or getattr(layer, "bias", None) is not None:
        return None
    method = type(layer.quant_method)
    if method in known.packed:
        return None if layer.order is not None else matrix_in(layer)
    return Matrix(layer.weight) if method in known.unquantized else None
