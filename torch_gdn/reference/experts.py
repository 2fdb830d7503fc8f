"""The ops of a mixture of experts: the router and its logits, gate and up, down."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_gdn.reference.common import compute_dtype
from torch_gdn.reference.quantized import matrix

__all__ = ["moe_down", "moe_gate_up", "moe_logits", "moe_router"]


def moe_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x Wᵀ in float32."""
    dtype = compute_dtype(x)
    return x.to(dtype) @ weight.to(dtype).mT


def moe_router(
    router_logits: Tensor, top_k: int, scoring: str = "softmax", correction_bias: Tensor | None = None,
    n_group: int = 1, topk_group: int = 1, renormalize: bool = True, routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the top_k experts with the highest score + bias, highest first, and their scores as weights.

    The lower id wins a tie. A group of experts counts the sum of its two highest values with a bias, and its highest
    value without one. Experts outside the topk_group best groups cannot be chosen.
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
    """Returns the positions of the highest values of each row, in descending order."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def moe_gate_up(
    x: Tensor, w_gate_up: Tensor, topk_ids: Tensor, shared_gate_proj: Tensor | None = None,
    shared_up_proj: Tensor | None = None, w_scales: Tensor | None = None, w_biases: Tensor | None = None,
    shared_gate_scales: Tensor | None = None, shared_gate_biases: Tensor | None = None,
    shared_up_scales: Tensor | None = None, shared_up_biases: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns silu(x W_gate) * (x W_up) for each token and each of its experts, and for the shared expert."""
    dtype = compute_dtype(x)
    upcast = x.to(dtype)
    weights = matrix(w_gate_up, w_scales, w_biases, x.shape[-1], dtype)
    hidden = x.new_zeros(*topk_ids.shape, w_gate_up.shape[1] // 2)
    for t, j in (topk_ids >= 0).nonzero().tolist():
        gate, up = (weights[topk_ids[t, j]] @ upcast[t]).chunk(2)
        hidden[t, j] = silu(gate) * up
    if shared_gate_proj is None or shared_up_proj is None:
        return hidden, None
    shared_gate = matrix(shared_gate_proj, shared_gate_scales, shared_gate_biases, x.shape[-1], dtype)
    shared_up = matrix(shared_up_proj, shared_up_scales, shared_up_biases, x.shape[-1], dtype)
    return hidden, (silu(upcast @ shared_gate.mT) * (upcast @ shared_up.mT)).to(x.dtype)


def moe_down(
    hidden: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_hidden: Tensor | None = None,
    shared_down_proj: Tensor | None = None, shared_gate: Tensor | None = None, w_scales: Tensor | None = None,
    w_biases: Tensor | None = None, shared_scales: Tensor | None = None, shared_biases: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the weighted sum over each token's experts, plus the shared expert's part times sigmoid(shared_gate),
    plus residual.
    """
    dtype = compute_dtype(hidden)
    weights = matrix(w_down, w_scales, w_biases, hidden.shape[-1], dtype)
    y = torch.zeros(len(hidden), w_down.shape[1], dtype=dtype, device=hidden.device)
    for t, j in (topk_ids >= 0).nonzero().tolist():
        y[t] += topk_weights[t, j].to(dtype) * (weights[topk_ids[t, j]] @ hidden[t, j].to(dtype))
    if shared_hidden is not None and shared_down_proj is not None:
        shared_down = matrix(shared_down_proj, shared_scales, shared_biases, shared_hidden.shape[-1], dtype)
        shared = shared_hidden.to(dtype) @ shared_down.mT
        y += shared if shared_gate is None else shared * shared_gate.to(dtype).sigmoid()
    if residual is not None:
        y += residual.to(dtype)
    return y.to(hidden.dtype)
