"""The ops of a mixture of experts: the router, gate and up, down."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_gdn.reference.common import compute_dtype

__all__ = ["moe_down", "moe_gate_up", "moe_router"]


def moe_router(
    router_logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The top_k experts with the highest score + bias, highest first, and their scores as weights.

    The lower id wins a tie. A group of experts counts the sum of its two highest values with a bias, its highest value
    without; experts outside the topk_group best groups cannot be chosen.
    """
    logits = router_logits.to(compute_dtype(router_logits))
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    values = scores if correction_bias is None else scores + correction_bias.to(logits.dtype)
    grouped = values.unflatten(-1, (n_group, -1))
    counted = 1 if correction_bias is None else min(2, grouped.shape[-1])
    best = highest(grouped.topk(counted, -1).values.sum(-1), topk_group)
    is_open = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=logits.device).scatter(-1, best, True)
    values = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    ids = highest(values, top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.int()


def highest(x: Tensor, count: int) -> Tensor:
    """The positions of the highest values of each row, in descending order."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def moe_gate_up(
    x: Tensor,
    w_gate_up: Tensor,
    topk_ids: Tensor,
    shared_gate_proj: Tensor | None = None,
    shared_up_proj: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """silu(x W_gate) * (x W_up) for each token and each of its experts, and for the shared expert."""
    dtype = compute_dtype(x)
    upcast = x.to(dtype)
    hidden = x.new_zeros(*topk_ids.shape, w_gate_up.shape[1] // 2)
    for t, j in (topk_ids >= 0).nonzero().tolist():
        gate, up = (w_gate_up[topk_ids[t, j]].to(dtype) @ upcast[t]).chunk(2)
        hidden[t, j] = silu(gate) * up
    if shared_gate_proj is None or shared_up_proj is None:
        return hidden, None
    shared = silu(upcast @ shared_gate_proj.to(dtype).mT) * (upcast @ shared_up_proj.to(dtype).mT)
    return hidden, shared.to(x.dtype)


def moe_down(
    hidden: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_hidden: Tensor | None = None,
    shared_down_proj: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """The weighted sum over each token's experts, and the shared expert's part times sigmoid(shared_gate)."""
    dtype = compute_dtype(hidden)
    y = torch.zeros(len(hidden), w_down.shape[1], dtype=dtype, device=hidden.device)
    for t, j in (topk_ids >= 0).nonzero().tolist():
        y[t] += topk_weights[t, j].to(dtype) * (w_down[topk_ids[t, j]].to(dtype) @ hidden[t, j].to(dtype))
    if shared_hidden is not None and shared_down_proj is not None:
        shared = shared_hidden.to(dtype) @ shared_down_proj.to(dtype).mT
        y += shared if shared_gate is None else shared * shared_gate.to(dtype).sigmoid()
    return y.to(hidden.dtype)
