"""The ops around the rule: norms, gates, the short convolution."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_gdn.reference.common import beta_of, compute_dtype, gradients, log_decay_of, sequences

__all__ = [
    "act_and_mul",
    "batch_copy_",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_update_",
    "copy_from_host_",
    "gdn_gating",
    "l2norm",
    "l2norm_fwd",
    "norm_bwd",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_gated",
]


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns x * rsqrt(sum x^2 + eps) over the last dimension."""
    return l2norm_fwd(x, eps)[0]


def l2norm_fwd(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Returns the same, and the factor of each row."""
    upcast = x.to(compute_dtype(x))
    rstd = torch.rsqrt(upcast.square().sum(-1) + eps)
    return (upcast * rstd[..., None]).to(x.dtype), rstd


def gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor | None = None, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), or twice that."""
    dtype = compute_dtype(a)
    return log_decay_of(a.to(dtype), True, A_log, dt_bias), beta_of(b.to(dtype), True, allow_neg_eigval)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-6,
    zero_centered: bool = False, round_norm: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns h * rsqrt(mean h^2 + eps) * weight over the last dimension. h is x, or x + residual.

    With `zero_centered` the factor is 1 + weight. With `round_norm` the normalised h is first rounded to x's dtype.
    """
    dtype = compute_dtype(x)
    h = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if round_norm:
        y = y.to(x.dtype).to(dtype)
    if weight is not None:
        y = y * (weight.to(dtype) + zero_centered)
    return y.to(x.dtype), None if residual is None else h.to(x.dtype)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None = None, eps: float = 1e-6, activation: str = "silu",
    round_norm: bool = False,
) -> Tensor:  # fmt: skip
    """Returns x * rsqrt(mean x^2 + eps) * weight * silu(g) over the last dimension, or with sigmoid(g).

    With `round_norm` the normalised x is rounded to x's dtype, and its product with the weight to the dtype of both.
    """
    dtype = compute_dtype(x)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if round_norm:
        y = y.to(x.dtype)
    if weight is not None:
        y = weight * y if round_norm else weight.to(dtype) * y
    g = g.to(dtype)
    return (y * (g.sigmoid() if activation == "sigmoid" else g * g.sigmoid())).to(x.dtype)


def norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None = None, g: Tensor | None = None, dh: Tensor | None = None,
    activation: str = "silu", eps: float = 1e-6, zero_centered: bool = False, over_sum: bool = False,
    output_dweight: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of x, g and weight in `rms_norm`, `rms_norm_gated`, or with `over_sum` in `l2norm`.

    dy is that of the result. dh, that of the normalised sum x, is added.
    """

    def norm(x: Tensor, g: Tensor | None, weight: Tensor | None) -> Tensor:
        y = l2norm(x, eps) if over_sum else rms_norm(x, None, None, eps)[0]
        y = y if weight is None else y * (weight + zero_centered)
        return y if g is None else y * (g.sigmoid() if activation == "sigmoid" else silu(g))

    dx, dg, dweight = gradients(norm, (x, g, weight), (dy,))
    return dx if dx is None or dh is None else dx + dh, dg, dweight if output_dweight else None


def act_and_mul(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Returns silu(gate) * up, or sigmoid(gate) * up."""
    dtype = compute_dtype(gate)
    logit = gate.to(dtype)
    factor = logit.sigmoid() if activation == "sigmoid" else silu(logit)
    return (factor * up.to(dtype)).to(gate.dtype)


def qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 1e-6, zero_centered: bool = False, heads_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Applies the norm of each head, if there are weights, and rotates its first 2 P elements in pairs (i, i + P)."""
    dtype, pairs = compute_dtype(q), cos.shape[-1]
    cos, sin = cos.to(dtype)[:, :, None], sin.to(dtype)[:, :, None]
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        z = x.to(dtype) if weight is None else rms_norm(x.to(dtype), weight, None, eps, zero_centered)[0]
        first, second, rest = z.split([pairs, pairs, z.shape[-1] - 2 * pairs], -1)
        y = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)
        rotated.append(y.transpose(1, 2).contiguous() if heads_first else y)
    return rotated[0], rotated[1]


def copy_from_host_(dst: Tensor, src: Tensor) -> None:
    dst.copy_(src)


def batch_copy_(pool: Tensor, source_offsets: Tensor, destination_offsets: Tensor, sizes: Tensor) -> None:
    """Copies pool[source : source + size] to pool[destination : destination + size] for each range. It reads all ranges
    first.
    """
    before = pool.clone()
    ranges = (source_offsets.tolist(), destination_offsets.tolist(), sizes.tolist())
    for source, destination, size in zip(*ranges, strict=True):
        pool[destination : destination + size] = before[source : source + size]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_width: int | None = None,
    activation: str | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns y[t] = silu(bias + sum over j of weight[W - 1 - j] x[t - j]) + residual[t], for x [B, T, D] after the
    state.
    """
    dtype = compute_dtype(x)
    batch, tokens, channels = x.shape
    W = weight.shape[1]
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        state = x.new_zeros(count, channels, W if state_width is None else state_width)
    else:
        state = initial_state
    S = state.shape[2]
    y, final_state = torch.empty_like(x, dtype=dtype), torch.empty_like(state)
    for n, b, first, last, _ in sequences(batch, tokens, cu_seqlens):
        columns = torch.cat([state[n].to(dtype), x[b, first:last].T.to(dtype)], dim=1)  # [D, S + tokens]
        final_state[n] = columns[:, columns.shape[1] - S :]
        for t in range(first, last):
            window = columns[:, S + t - first + 1 - W : S + t - first + 1]
            if seq_idx is not None:
                window = torch.where(taps_in_segment(seq_idx[b], t, W), window, 0)
            y[b, t] = (weight.to(dtype) * window).sum(1)
    if bias is not None:
        y += bias.to(dtype)
    if activation is not None:
        y = silu(y)
    if residual is not None:
        y = y + residual.to(dtype)
    if seq_idx is not None:
        y = torch.where(seq_idx[..., None] < 0, 0, y)
    return y.to(x.dtype), final_state if output_final_state else None


def causal_conv1d_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    dfinal_state: Tensor | None = None, activation: str | None = None, cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None, output_dweight: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of x, weight, bias and initial_state in `causal_conv1d`."""
    has_final, width = dfinal_state is not None, None if dfinal_state is None else dfinal_state.shape[2]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> Any:
        options = (activation, cu_seqlens, seq_idx)
        return causal_conv1d(x, weight, bias, None, initial_state, has_final, width, *options)

    dx, dweight, dbias, dstate = gradients(convolve, (x, weight, bias, initial_state), (dy, dfinal_state))
    return dx, dweight if output_dweight else None, dbias if output_dweight else None, dstate


def taps_in_segment(seq_idx: Tensor, t: int, W: int) -> Tensor:
    """Returns which of the last W tokens have token t's number. seq_idx is [T]."""
    here = [bool(t >= back and seq_idx[t - back] == seq_idx[t]) for back in reversed(range(W))]
    return torch.tensor(here, device=seq_idx.device)


def causal_conv1d_update_(
    x: Tensor, weight: Tensor, state_pool: Tensor, state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, null_index: int = -1, bias: Tensor | None = None,
    activation: str | None = None, cu_seqlens: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs `causal_conv1d` from the slots of a pool, and updates them. Returns zeros for a sequence without a slot.

    The state after checkpoint_offsets tokens goes to another slot.
    """
    count = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    indices = list(range(count)) if state_indices is None else state_indices.tolist()
    lowest = -1 if state_indices is None else null_index
    y = torch.zeros_like(x)
    for n, b, first, last, _ in sequences(x.shape[0], x.shape[1], cu_seqlens):
        if indices[n] <= lowest:
            continue
        state = state_pool[indices[n]]
        if has_initial_state is not None and not has_initial_state[n]:
            state = torch.zeros_like(state)
        here = x[b : b + 1, first:last]
        added = None if residual is None else residual[b : b + 1, first:last]
        y[b, first:last], final_state = causal_conv1d(
            here, weight, bias, added, state[None], True, activation=activation
        )
        assert final_state is not None
        if checkpoint_offsets is not None and checkpoint_indices is not None:
            tokens, index = int(checkpoint_offsets[n]), int(checkpoint_indices[n])
            if tokens > 0 and index > null_index:
                _, kept = causal_conv1d(here[:, :tokens], weight, None, None, state[None], True)
                assert kept is not None
                state_pool[index] = kept[0]
        state_pool[indices[n]] = final_state[0]
    return y
