"""The functions that a Gated DeltaNet layer of transformers calls: when torch_gdn takes one, and what it then runs.

Each has a `reason` (empty, or a sentence on what torch_gdn does not take) and a `run`, with the arguments that the
models of all versions give it, by the models' own names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import causal_conv1d_interface

DEVICES = ("mps", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_KEY, LARGEST_VALUE = 256, 512
CHUNK_SIZES = (16, 32, 64)
WIDTHS = (2, 3, 4)  # of a convolution
ACTIVATIONS = (None, "silu", "swish")
GATES = ("silu", "swish", "sigmoid")
LARGEST_ROW = 1024  # of a norm


@dataclass(frozen=True)
class Function:
    reason: Callable[..., str]
    run: Callable[..., Any]


def unlike_each_other(*tensors: Tensor | None) -> str:
    """What is said of the tensors of any call: where they are, and whether a gradient is wanted."""
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if device.type not in DEVICES:
        return f"the tensors are on {device.type}; torch_gdn has kernels for {' and '.join(DEVICES)}"
    if any(tensor.device != device for tensor in given):
        return "the tensors are on several devices"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return (
            "grad mode is on and an input requires grad; torch_gdn's kernels are forward only "
            "(torch.no_grad() and torch.inference_mode() turn it off)"
        )
    return ""


def delta_rule_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *positional: Any,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> str:
    if positional:
        return "arguments behind beta are given by position"
    if reason := unlike_each_other(query, key, value, g, beta, initial_state):
        return reason
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}, not one of {DTYPES}"
    if not (g.dtype.is_floating_point and beta.dtype.is_floating_point):
        return f"g and beta are {g.dtype} and {beta.dtype}, not floating"
    if query.dim() != 4 or value.dim() != 4:
        return f"query and value have {query.dim()} and {value.dim()} dimensions, not the 4 of [B, T, heads, size]"
    if not 1 <= query.shape[-1] <= LARGEST_KEY or not 1 <= value.shape[-1] <= LARGEST_VALUE:
        return (
            f"a head has {query.shape[-1]} by {value.shape[-1]} values; torch_gdn goes to {LARGEST_KEY} by "
            f"{LARGEST_VALUE}"
        )
    if not query.shape[2] or value.shape[2] % query.shape[2]:
        return f"{value.shape[2]} value heads are no multiple of {query.shape[2]} key heads"
    if chunk_size not in CHUNK_SIZES:
        return f"chunk_size is {chunk_size}, not one of {CHUNK_SIZES}"
    if initial_state is not None and not initial_state.dtype.is_floating_point:
        return f"initial_state is {initial_state.dtype}, not floating"
    if seq_idx is not None and cu_seqlens is None:
        return "packed sequences come as seq_idx without cu_seq_lens_q, which the delta rule goes by"
    if cu_seqlens is not None and query.shape[0] != 1:
        return f"packed sequences come in a batch of {query.shape[0]}, not of 1"
    return ""


def run_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    return torch_gdn.chunk_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def run_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    return torch_gdn.fused_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def convolution_reason(
    hidden_states: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    x: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> str:
    """Of `causal_conv1d_fn`, which is given `x` until 5.12 and `hidden_states` since."""
    columns = hidden_states if x is None else x
    assert columns is not None and weight is not None
    if seq_idx is not None and seq_idx.dtype not in (torch.int32, torch.int64):
        return f"seq_idx is {seq_idx.dtype}, not an integer of 32 or 64 bits"
    return any_convolution_reason(columns, weight, bias, activation, seq_idx)


def update_reason(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> str:
    if conv_state.dtype not in DTYPES:
        return f"conv_state is {conv_state.dtype}, not one of {DTYPES}"
    return any_convolution_reason(hidden_states, weight, bias, activation, conv_state)


def any_convolution_reason(
    columns: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, other: Tensor | None
) -> str:
    if reason := unlike_each_other(columns, weight, bias, other):
        return reason
    if columns.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"the convolution's input and weight are {columns.dtype} and {weight.dtype}, not one of {DTYPES}"
    if bias is not None and bias.dtype != weight.dtype:
        return f"the convolution's bias is {bias.dtype}, its weight {weight.dtype}"
    if columns.dim() != 3 or weight.dim() != 2:
        return f"the convolution's input and weight have {columns.dim()} and {weight.dim()} dimensions, not 3 and 2"
    if weight.shape[-1] not in WIDTHS:
        return f"the convolution is {weight.shape[-1]} wide; torch_gdn has widths of {WIDTHS}"
    if activation not in ACTIVATIONS:
        return f"the convolution's activation is {activation}, not one of {ACTIVATIONS}"
    return ""


def run_convolution(
    hidden_states: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    x: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """[B, D, T], channel-last: q, k and v are then views that the delta rule takes without a copy."""
    columns = hidden_states if x is None else x
    assert columns is not None and weight is not None
    bounds = cu_seq_lens_q if seq_idx is None else None
    rows = columns.transpose(1, 2)
    y, _ = torch.ops.gdn.causal_conv1d(rows, weight, bias, None, False, None, activation, bounds, seq_idx)
    return y.transpose(1, 2)


def run_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    return causal_conv1d_interface.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


def short_convolution_reason(
    layer: Any, hidden_states: Tensor, cache: Tensor | None = None, use_precomputed: bool = False, **others: Any
) -> str:
    """Of OLMo-Hybrid until 5.12: a layer over rows that hands on the last W - 1 columns."""
    if cache is not None and cache.dtype not in DTYPES:
        return f"the convolution's state is {cache.dtype}, not one of {DTYPES}"
    return any_convolution_reason(hidden_states, layer.weight[:, 0], layer.bias, "silu", cache)


def run_short_convolution(
    layer: Any, hidden_states: Tensor, cache: Tensor | None = None, use_precomputed: bool = False, **others: Any
) -> tuple[Tensor, Tensor]:
    y, state = causal_conv1d_interface.causal_conv1d_fn(
        hidden_states.transpose(1, 2),
        layer.weight[:, 0],
        layer.bias,
        initial_states=cache if use_precomputed else None,
        return_final_states=True,
        activation="silu",
    )
    return y.transpose(1, 2), state


def norm_reason(layer: Any, hidden_states: Tensor, gate: Tensor | None = None) -> str:
    if gate is None:
        return "the gated norm has no gate"
    if reason := unlike_each_other(hidden_states, gate, layer.weight):
        return reason
    if not {hidden_states.dtype, gate.dtype, layer.weight.dtype} <= set(DTYPES):
        return (
            f"the gated norm's input, gate and weight are {hidden_states.dtype}, {gate.dtype} and "
            f"{layer.weight.dtype}, not of {DTYPES}"
        )
    if gate.shape != hidden_states.shape:
        return f"the gated norm's input and gate are {list(hidden_states.shape)} and {list(gate.shape)}"
    if not 1 <= hidden_states.shape[-1] <= LARGEST_ROW:
        return f"the gated norm has rows of {hidden_states.shape[-1]} values; torch_gdn goes to {LARGEST_ROW}"
    if gate_activation(layer) not in GATES:
        return f"the gated norm's activation is {gate_activation(layer)}, not one of {GATES}"
    return ""


def run_norm(layer: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return torch_gdn.rms_norm_gated(
        hidden_states,
        gate,
        layer.weight,
        activation=gate_activation(layer),
        eps=layer.variance_epsilon,
        round_norm=True,
    )


def gate_activation(layer: Any) -> str:
    return getattr(layer, "activation", "silu")  # a fixed silu until 5.12


FUNCTIONS = {
    "chunk_gated_delta_rule": Function(delta_rule_reason, run_chunk),
    "fused_recurrent_gated_delta_rule": Function(delta_rule_reason, run_recurrent),
    "causal_conv1d_fn": Function(convolution_reason, run_convolution),
    "causal_conv1d_update": Function(update_reason, run_update),
    "short_convolution": Function(short_convolution_reason, run_short_convolution),
    "rms_norm_gated": Function(norm_reason, run_norm),
}
