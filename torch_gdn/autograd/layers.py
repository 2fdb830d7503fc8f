"""Gradients of the norms, the gates, the short convolution, and multiplication by packed weights.

A Function's arguments are those of its op, in the op's order.
"""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import Function, differentiate


def forward_of(op: str) -> Any:
    def forward(*arguments: Any) -> Any:
        return getattr(torch.ops.gdn, op)(*arguments)

    return staticmethod(forward)


def like(gradient: Tensor, x: Tensor | None, is_needed: bool) -> Tensor | None:
    """Returns the gradient of a parameter with the parameter's shape and dtype, or None if nobody needs it."""
    return gradient.view(x.shape).to(x.dtype) if is_needed and x is not None else None


class RmsNorm(Function):
    forward = forward_of("rms_norm")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, residual, ctx.eps, ctx.zero_centered, _ = inputs
        ctx.save_for_backward(x if residual is None else output[1], weight)
        ctx.set_materialize_grads(False)
        ctx.has_residual = residual is not None
        if residual is None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> Any:
        h, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_residual = ctx.needs_input_grad[:3]
        if dy is None:  # only h was used
            return dh if needs_x else None, None, dh if needs_residual else None, None, None, None
        dh = dh.contiguous() if ctx.has_residual and dh is not None else None  # torch.compile passes zeros
        dx, _, dweight = differentiate(
            "norm_bwd", dy.contiguous(), h, weight, None, dh, "silu", ctx.eps, ctx.zero_centered, False, needs_weight
        )
        dweight = like(dweight, weight, needs_weight)
        return dx if needs_x else None, dweight, dx if needs_residual else None, None, None, None


class RmsNormGated(Function):
    forward = forward_of("rms_norm_gated")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.activation, ctx.eps = inputs[3:5]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, g, weight = ctx.saved_tensors
        needs_x, needs_g, needs_weight = ctx.needs_input_grad[:3]
        dx, dg, dweight = differentiate(
            "norm_bwd", dy.contiguous(), x, weight, g, None, ctx.activation, ctx.eps, False, False, needs_weight
        )
        return dx if needs_x else None, dg if needs_g else None, like(dweight, weight, needs_weight), None, None, None


class L2Norm(Function):
    @staticmethod
    def forward(x: Tensor, eps: float) -> Tensor:
        return torch.ops.gdn.l2norm(x, eps)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.eps = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        args = (x, None, None, None, "silu", ctx.eps, False, True, False)
        return differentiate("norm_bwd", dy.contiguous(), *args)[0], None


class KdaGate(Function):
    forward = forward_of("fused_kda_gate")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.lower_bound = inputs[3]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        g, A_log, dt_bias = ctx.saved_tensors
        needs_g, needs_A_log, needs_bias = ctx.needs_input_grad[:3]
        dg, dA_log, dbias = differentiate("fused_kda_gate_bwd", dy.contiguous(), g, A_log, dt_bias, ctx.lower_bound)
        return dg if needs_g else None, like(dA_log, A_log, needs_A_log), like(dbias, dt_bias, needs_bias), None, None


class GdnGating(Function):
    """The backward uses that of Kimi Delta Attention's gate: a head is one of a single channel."""

    forward = forward_of("gdn_gating")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.beta_scale = 2.0 if inputs[4] else 1.0
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dg: Tensor | None, dbeta: Tensor | None) -> Any:
        A_log, a, b, dt_bias = ctx.saved_tensors
        needs_A_log, needs_a, needs_b, needs_bias = ctx.needs_input_grad[:4]
        da = dA_log = dbias = db = None
        if dg is not None and (needs_A_log or needs_a or needs_bias):
            channels = (dg[..., None].contiguous(), a[..., None])
            da, dA_log, dbias = differentiate("fused_kda_gate_bwd", *channels, A_log, dt_bias)
            da, dA_log, dbias = like(da, a, needs_a), like(dA_log, A_log, needs_A_log), like(dbias, dt_bias, needs_bias)
        if dbeta is not None and needs_b:  # beta is minus the bounded gate
            channels = (dbeta[..., None].contiguous(), b[..., None])
            db = -differentiate("fused_kda_gate_bwd", *channels, None, None, -ctx.beta_scale)[0][..., 0]
        return dA_log, da, db, dbias, None


class CausalConv1d(Function):
    forward = forward_of("causal_conv1d")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, initial_state, has_final, _, ctx.activation, cu_seqlens, seq_idx = inputs
        ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens, seq_idx)
        ctx.set_materialize_grads(False)
        ctx.has_final = has_final
        if not has_final:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None) -> Any:
        x, weight, bias, initial_state, cu_seqlens, seq_idx = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, needs_state = ctx.needs_input_grad[:5]
        rows = torch.zeros_like(x) if dy is None else dy.contiguous()
        dfinal_state = dfinal_state if ctx.has_final else None  # torch.compile passes zeros
        inputs = (rows, x, weight, bias, initial_state, dfinal_state, ctx.activation, cu_seqlens, seq_idx)
        dx, dweight, dbias, dstate = differentiate("causal_conv1d_bwd", *inputs, needs_weight or needs_bias)
        dweight, dbias = like(dweight, weight, needs_weight), like(dbias, bias, needs_bias)
        dx, dstate = dx if needs_x else None, dstate if needs_state else None
        return dx, dweight, dbias, dy if needs_residual else None, dstate, None, None, None, None, None


def keep_call(y: Tensor, arguments: tuple[Any, ...]) -> None:
    """Notes on a convolution's output how to compute it again, unless the call has a residual."""
    if arguments[3] is None and not torch.compiler.is_compiling():
        detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        y.torch_gdn_convolution = (*detached[:5], False, None, *detached[7:])  # type: ignore[attr-defined]


def call_of_convolution(*views: Tensor) -> tuple[Any, ...]:
    """Returns the arguments of the op of which all tensors are views, or () if that cannot be seen."""
    base = None if torch.compiler.is_compiling() else views[0]._base
    if base is None or base._version > 0 or any(x._base is not base or x.dtype != base.dtype for x in views):
        return ()
    return getattr(base, "torch_gdn_convolution", ())


class QuantizedLinear(Function):
    """The weights are frozen. The gradient of x multiplies by them as numbers of x's dtype."""

    forward = forward_of("quantized_linear")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *packed, _ = inputs
        ctx.save_for_backward(*packed)
        ctx.bits = 8 * packed[0].element_size() * packed[0].shape[-1] // x.shape[-1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if any(ctx.needs_input_grad[1:]):
            raise RuntimeError(
                "quantized_linear: expected frozen weights and a frozen bias, got one that requires grad"
            )
        weight = torch.ops.gdn.dequantize(*ctx.saved_tensors, ctx.bits, None, dy.dtype)
        with torch.autocast(dy.device.type, enabled=False):
            return dy @ weight, None, None, None, None
