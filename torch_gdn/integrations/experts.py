"""Calls the ops of a mixture of experts, as transformers' models and the engines' do. No tensor is read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A matrix of weights: unquantised, or packed codes with the scales and biases of their groups."""

    weight: Tensor
    scales: Tensor | None = None
    biases: Tensor | None = None

    def has_halves(self) -> bool:
        """Returns whether no block of scales is in both halves."""
        return self.scales is None or len(self.scales) == len(self.weight) or len(self.weight) % 256 == 0

    def halves(self) -> list[Matrix]:
        """Returns the upper and the lower half of the rows."""
        parts = [(None, None) if each is None else each.chunk(2) for each in self]
        return [Matrix(*half) for half in zip(*parts, strict=True)]


def matrix_in(module: Any, weight: str = "weight", prefix: str = "") -> Matrix:
    """Returns a module's matrix. If it is packed, the names of its scales and biases begin with the prefix."""
    scales: Any = getattr(module, f"{prefix}scales", None)
    biases: Any = getattr(module, f"{prefix}biases", None)
    if biases is not None and biases.dtype == torch.uint8 and scales.dtype == torch.float32:
        biases = -(biases * scales)  # zero points, where PEFT's prepare_model_for_kbit_training has widened the scales
    return Matrix(getattr(module, weight), scales, biases)


class SharedExpert(NamedTuple):
    """The matrices of an expert that every token uses."""

    gate_proj: Matrix  # [IS, H]
    up_proj: Matrix
    down_proj: Matrix  # [H, IS]
    gate: Callable[[Tensor], Tensor] | None  # computes the logit of its weight for each token, [T, 1]


NO_MATRIX = (None, None, None)


def fused_experts(
    x: Tensor,
    gate_up: Matrix,
    down: Matrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared: SharedExpert | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, H]; gate_up [E, 2 I, H], gate above up; down [E, H, I]; topk_weights and topk_ids [T, topk]."""
    gate_proj, up_proj, down_proj, gate = shared or (NO_MATRIX, NO_MATRIX, NO_MATRIX, None)
    scales_and_biases = (*gate_up[1:], *gate_proj[1:], *up_proj[1:])
    hidden, shared_hidden = torch.ops.gdn.moe_gate_up(
        x, gate_up.weight, topk_ids, gate_proj[0], up_proj[0], *scales_and_biases
    )
    own = (shared_hidden if shared else None, down_proj[0], None if gate is None else gate(x))
    y: Tensor = torch.ops.gdn.moe_down(
        hidden, down.weight, topk_weights, topk_ids, *own, *down[1:], *down_proj[1:], residual
    )
    return y
