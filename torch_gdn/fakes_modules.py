"""Fakes, as in fakes.py, of what stands around the delta rule in a layer: convolution, gates, gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.fakes import Check


def check_slots(
    check: Check,
    N: int,
    state_pool: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    null_index: int,
) -> None:
    """What every in-place twin accepts beside the functional op's arguments."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(state_pool.shape, state_pool.stride(), strict=True))
    expected = "every element at a place of its own"
    check.value(not overlaps, "state_pool", expected, f"strides {state_pool.stride()}")
    check.value(null_index in (-1, 0), "null_index", "-1 or 0", null_index)
    if has_initial_state is not None:
        check.dtype(has_initial_state.dtype == torch.bool, "has_initial_state", "dtype bool", has_initial_state)
        check.shape("has_initial_state", has_initial_state, "[N]", (N,))
    if state_indices is None:
        slots = state_pool.shape[0]
        expected = "a slot for each sequence"
        check.value(slots >= N, "state_pool", expected, f"{slots} slots for {N} sequences")
        return
    check.integers("state_indices", state_indices)
    expected, got = "shape [N], one for a sequence", f"{state_indices.shape} for {N} sequences"
    check.value(state_indices.dim() == 1, "state_indices", expected, got)
    check.value(state_indices.shape[0] == N, "state_indices", expected, got)


def check_convolution(
    check: Check, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None
) -> int:
    """N."""
    check.activation("x", x)
    check.dimensions("x", x, "[B, T, D]")
    check.activation("weight", weight)
    check.dimensions("weight", weight, "[D, W]")
    W = weight.shape[1]
    check.shape("weight", weight, "[D, W]", (x.shape[2], W))
    check.value(W >= 2, "weight", "W from 2 to 4", W)
    check.value(W <= 4, "weight", "W from 2 to 4", W)
    if bias is not None:
        check.dtype(bias.dtype == weight.dtype, "bias", f"dtype {weight.dtype} like weight", bias)
        check.shape("bias", bias, "[D]", (x.shape[2],))
    check.value(activation in (None, "silu", "swish"), "activation", "None, 'silu' or 'swish'", activation)
    return check.sequences(x.shape[0], cu_seqlens, None)


def check_convolution_state(check: Check, argument: str, state: Tensor, weight: Tensor) -> None:
    check.activation(argument, state)
    W, S = weight.shape[1], state.shape[2]
    check.value(S >= W - 1, argument, "a width of at least W - 1", f"{S} for W = {W}")


@torch.library.register_fake("gdn::causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_width: int | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check = Check("causal_conv1d", "x", x)
    N = check_convolution(check, x, weight, bias, activation, cu_seqlens)
    (B, T, D), W = x.shape, weight.shape[1]
    S = W if state_width is None else state_width
    if initial_state is not None:
        check.dimensions("initial_state", initial_state, "[N, D, S]")
        S = initial_state.shape[2]
        check.shape("initial_state", initial_state, "[N, D, S]", (N, D, S))
        check_convolution_state(check, "initial_state", initial_state, weight)
    expected = "that of initial_state, or at least W - 1"
    if state_width is not None:
        check.value(state_width == S, "state_width", expected, f"{state_width} for W = {W}")
    check.value(S >= W - 1, "state_width", expected, f"{S} for W = {W}")
    if seq_idx is not None:
        check.integers("seq_idx", seq_idx)
        check.value(seq_idx.device == x.device, "seq_idx", "a tensor on the device of x", f"one on {seq_idx.device}")
        check.shape("seq_idx", seq_idx, "[B, T]", (B, T))
        alone = initial_state is None and not output_final_state and cu_seqlens is None
        expected = "None where there is a cu_seqlens, an initial or a final state"
        check.value(alone, "seq_idx", expected, "a tensor")
    state_like = x if initial_state is None else initial_state
    return x.new_empty((B, T, D)), state_like.new_empty((N, D, S) if output_final_state else (0,))


@torch.library.register_fake("gdn::causal_conv1d_update_")
def causal_conv1d_update_(
    x: Tensor,
    weight: Tensor,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    check = Check("causal_conv1d_update_", "x", x)
    N = check_convolution(check, x, weight, bias, activation, cu_seqlens)
    check.dimensions("state_pool", state_pool, "[slots, D, S]")
    sizes = (state_pool.shape[0], x.shape[2], state_pool.shape[2])
    check.shape("state_pool", state_pool, "[slots, D, S]", sizes)
    check_convolution_state(check, "state_pool", state_pool, weight)
    check_slots(check, N, state_pool, state_indices, has_initial_state, null_index)
    return x.new_empty(x.shape)


@torch.library.register_fake("gdn::gdn_gating")
def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    check = Check("gdn_gating", "A_log", A_log)
    check.activation("A_log", A_log)
    check.dimensions("A_log", A_log, "[HV]")
    HV = A_log.shape[0]
    check.value(HV >= 1, "A_log", "at least one head", HV)
    check.activation("a", a)
    check.value(a.dim() >= 1, "a", "shape [..., HV] with the HV of A_log", a.shape)
    check.value(a.shape[-1] == HV, "a", "shape [..., HV] with the HV of A_log", a.shape)
    check.device("a", a)
    check.activation("b", b)
    check_same_shape(check, "b", b, "a", a)
    check.device("b", b)
    if dt_bias is not None:
        check.activation("dt_bias", dt_bias)
        check.shape("dt_bias", dt_bias, "[HV]", (HV,))
    return a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.float32)


def check_same_shape(check: Check, argument: str, x: Tensor, name: str, other: Tensor) -> None:
    expected, got = f"the shape of {name}", f"{x.shape} for {other.shape}"
    check.value(x.dim() == other.dim(), argument, expected, got)
    for size, wanted in zip(x.shape, other.shape, strict=True):
        check.value(size == wanted, argument, expected, got)


@torch.library.register_fake("gdn::rms_norm_gated")
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "silu",
    round_norm: bool = False,
) -> Tensor:
    check = Check("rms_norm_gated", "x", x)
    check.activation("x", x)
    check.value(x.dim() >= 1, "x", "at least one dimension", x.dim())
    D = x.shape[-1]
    check.value(D >= 1, "x", "a last dimension from 1 to 1024", D)
    check.value(D <= 1024, "x", "a last dimension from 1 to 1024", D)
    check.activation("g", g)
    check_same_shape(check, "g", g, "x", x)
    check.device("g", g)
    if weight is not None:
        check.activation("weight", weight)
        check.shape("weight", weight, "[D]", (D,))
    check.value(eps >= 0, "eps", "a number that is not negative", eps)
    known = activation in ("silu", "swish", "sigmoid")
    check.value(known, "activation", "'silu', 'swish' or 'sigmoid'", activation)
    return x.new_empty(x.shape)
