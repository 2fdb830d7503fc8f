"""Gradients of the public functions: a torch.autograd.Function for each, around the forward op and its backward op.

The ops under torch.ops.gdn have no autograd. A function applies its Function if `needs_grad` says so.
"""

from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    generate_vmap_rule = True  # torch.func.vmap calls an op once for each element of the batch


def needs_grad(*tensors: Tensor | None) -> bool:
    """Returns whether grad mode is on and one of the tensors requires grad."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def differentiate(op: str, *args: Any) -> Any:
    """Calls a backward op. With create_graph, as always in torch.func, its results refuse another gradient."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return Once.apply(op, *args)
    with torch.no_grad():
        return getattr(torch.ops.gdn, op)(*args)


class Once(Function):
    @staticmethod
    def forward(op: str, *args: Any) -> Any:
        return getattr(torch.ops.gdn, op)(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError(
            f"gdn::{ctx.op}: expected one derivative, got a gradient of a gradient, which it does not have"
        )
