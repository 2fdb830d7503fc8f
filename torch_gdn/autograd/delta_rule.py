"""Gradients of the delta rules. A Function saves a call's inputs, and nothing per chunk: the backward op computes the
states again. If q, k and v are views of a convolution's output, it saves that call's inputs, which the convolution
saves too, and convolves again. Raw gates are computed again too, and their gradients are those of `fused_kda_gate`,
which has a head's gate as that of one channel, and minus a sigmoid as the bounded gate."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_gdn.autograd import Function, differentiate, needs_grad
from torch_gdn.autograd.layers import call_of_convolution


class Options(NamedTuple):
    """A call's options, apart from tensors."""

    per_channel: bool  # Kimi Delta Attention
    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    state_v_first: bool = False
    chunk_size: int = 64
    use_gate_in_kernel: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    output_dtype: torch.dtype | None = None
    head_grouping: str = "block"
    return_intermediate_states: bool = False
    views: tuple[tuple[Any, ...], ...] = ()  # sizes, strides and offsets of q, k and v


class DeltaRule(Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the arguments of `delta_rule`, and those of the convolution of whose output q, k and v are views."""
        *inputs, initial_state, A_log, dt_bias, cu_seqlens, chunk_indices, its = arguments[:11]
        state = (initial_state, its.output_final_state, its.use_qk_l2norm_in_kernel, its.state_v_first, cu_seqlens)
        betas = (its.use_beta_sigmoid_in_kernel, its.allow_neg_eigval)
        more = (its.output_dtype, its.head_grouping, its.return_intermediate_states)
        gate: tuple[Any, ...] = (its.use_gate_in_kernel, A_log, dt_bias)
        if its.per_channel:
            chunks: tuple[Any, ...] = (its.chunk_size,)
            gate += (its.lower_bound,)
            op = torch.ops.gdn.chunk_kda
        else:
            chunks = (chunk_indices, its.chunk_size)
            op = torch.ops.gdn.chunk_gated_delta_rule
        o, final_state, h = op(*inputs, its.scale, *state, *chunks, *gate, *betas, *more)
        return o, final_state, h

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.options, convolution = inputs[:9], inputs[10], inputs[11:]
        ctx.other_arguments = [None if isinstance(x, Tensor) else x for x in convolution]
        convolution = [x if isinstance(x, Tensor) else None for x in convolution]
        ctx.save_for_backward(*((None,) * 3 if ctx.options.views else tensors[:3]), *tensors[3:], *convolution)
        ctx.set_materialize_grads(False)
        _, final_state, h = output
        ctx.mark_non_differentiable(*((h,) if ctx.options.output_final_state else (final_state, h)))

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _: Any) -> Any:
        q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, *convolution = ctx.saved_tensors
        its: Options = ctx.options
        if its.views:
            arguments = (y if x is None else x for x, y in zip(convolution, ctx.other_arguments, strict=True))
            with torch.no_grad():
                y, _ = torch.ops.gdn.causal_conv1d(*arguments)
                q, k, v = (y.as_strided(*view) for view in its.views)
        inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
        gate = torch.ops.gdn.fused_kda_gate
        wide = g if its.per_channel else g[..., None]
        gates = (wide, A_log, dt_bias, its.lower_bound)
        logits = (beta[..., None], None, None, -2.0 if its.allow_neg_eigval else -1.0)  # beta is minus the bounded gate
        with torch.no_grad():
            log_decays = gate(*gates, torch.float32) if its.use_gate_in_kernel else wide
            betas = -gate(*logits, torch.float32)[..., 0] if its.use_beta_sigmoid_in_kernel else beta
        do = torch.zeros_like(v) if do is None else do
        rule = (its.scale, initial_state, its.use_qk_l2norm_in_kernel, its.state_v_first, cu_seqlens, its.head_grouping)
        dq, dk, dv, dg, dbeta, dstate = differentiate(
            "chunk_kda_bwd" if its.per_channel else "chunk_gated_delta_rule_bwd",
            q, k, v, log_decays if its.per_channel else log_decays[..., 0], betas,
            do, dht if its.output_final_state else None, *rule,
        )  # fmt: skip
        dA_log = ddt_bias = None
        if its.use_gate_in_kernel:
            dg, dA_log, ddt_bias = differentiate("fused_kda_gate_bwd", dg.view(wide.shape), *gates)
        if its.use_beta_sigmoid_in_kernel:
            dbeta = -differentiate("fused_kda_gate_bwd", dbeta[..., None], *logits)[0]
        result = (dq, dk, dv, dg, dbeta, dstate, dA_log, ddt_bias)
        kept = (
            grad.view(x.shape).to(x.dtype) if need and x is not None and grad is not None else None
            for grad, x, need in zip(result, inputs, ctx.needs_input_grad, strict=False)
        )
        return *kept, *(None for _ in ctx.needs_input_grad[8:])


def delta_rule(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """Returns what the chunked functions do, and records what the gradients need if any is needed."""
    tensors = (*inputs, initial_state, A_log, dt_bias, cu_seqlens, chunk_indices)
    if needs_grad(*tensors):
        convolution = call_of_convolution(*inputs[:3])
        if convolution:
            options = options._replace(views=tuple((x.shape, x.stride(), x.storage_offset()) for x in inputs[:3]))
        o, final_state, h = DeltaRule.apply(*tensors, options, *convolution)
    else:
        o, final_state, h = DeltaRule.forward(*tensors, options)
    state_or_none = final_state if options.output_final_state else None
    return (o, state_or_none, h) if options.return_intermediate_states else (o, state_or_none)


def inputs_of_chunks(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns a recurrent function's inputs for the chunked rule, which has gradients, or refuses them."""
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            raise RuntimeError(f"{function}: {name}: expected None when a gradient is needed, got a tensor")
    if beta is not None and beta.dim() == 4:
        raise RuntimeError(
            f"{function}: beta: expected one value per head, [B, T, HV], when a gradient is needed, "
            f"got {tuple(beta.shape)}"
        )
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
    return q, k, v, g, v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
