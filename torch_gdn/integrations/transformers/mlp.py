"""Runs the MLP of transformers' models on mps: silu(gate) * up in one launch instead of two."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_gdn.integrations import plain
from torch_gdn.integrations.transformers import known_forms
from torch_gdn.integrations.transformers.functions import Function, are_alike, common_reason, grad_reason
from torch_gdn.integrations.transformers.refusal import refusal_of


def mlp_classes(module: ModuleType) -> Iterator[type]:
    """Yields the classes of a model's module that compute down(silu(gate(x)) * up(x))."""
    return (owner for owner in known_forms.classes(module, "MLP") if is_known(owner))


@plain.once_per_code
def is_known(owner: type) -> bool:
    """Draws large inputs too: they show whether a class limits its values."""
    builds = (owner, functools.partial(owner, intermediate_size=24))
    result = [
        known_forms.has_form(build, lambda run: run(30 * torch.randn(5, 32)), FUNCTIONS["mlp"]) for build in builds
    ]
    return True in result and False not in result


def mlp_reason(mlp: Any, x: Tensor, residual: Tensor | None = None) -> str:
    if change := plain.change_of(mlp.act_fn, known_forms.SILU):
        return change
    number = ((1,), x.dtype)
    return grad_reason(mlp) or common_reason(x) or refusal_of("act_and_mul", gate=number, up=number)


def run_mlp(mlp: Any, x: Tensor, /, residual: Tensor | None = None) -> Tensor:
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    hidden = torch.ops.gdn.act_and_mul(gate, up) if are_alike(gate, up) else mlp.act_fn(gate) * up
    if residual is None:
        result: Tensor = down(hidden)
        return result
    if not plain.change_of(down, plain.LINEARS) and down.bias is None and are_alike(down.weight, residual, hidden):
        rows = residual.flatten(0, -2), hidden.flatten(0, -2)
        return torch.addmm(*rows, down.weight.mT).view_as(residual)
    return residual + down(hidden)


FUNCTIONS = {"mlp": Function(mlp_reason, run_mlp, known_forms.is_skipped, adds_residual=True)}
