"""Mixture of experts on mps, where vLLM has no kernel for it. No tensor is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_experts(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """x [T, H]; w13 [E, 2 I, H], gate above up; w2 [E, H, I]; topk_weights and topk_ids [T, topk]."""
    hidden, _ = torch.ops.gdn.moe_gate_up(x, w13, topk_ids)
    out: Tensor = torch.ops.gdn.moe_down(hidden, w2, topk_weights, topk_ids)
    return out


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, unused: Tensor, gating_output: Tensor, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """vLLM's router, which is a CUDA kernel. Only the shapes and dtypes of what it would fill are used."""
    weights, ids = torch.ops.gdn.moe_router(gating_output, topk_indices.shape[1], renormalize=renormalize)
    return weights, ids.to(topk_indices.dtype)
