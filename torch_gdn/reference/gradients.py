"""The gradients of the delta rules, a chunk of tokens at a time, in plain PyTorch of any float dtype.

With the decays of a chunk in q_read, k_read and k_write, and S the state before it, the rule is

    r = v - k_read S - L u,  u = beta r,  o = q_read S + P u,  S <- last S + k_write^T u

where L is strictly lower triangular and P lower triangular. Decays are [..., 1] of a head or [..., K] of its channels.
A stage has the name of its kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_gdn.reference.common import (
    LOWEST_LOG_DECAY,
    compute_dtype,
    key_first,
    per_value_head,
    sequences,
)
from torch_gdn.reference.layers import l2norm

__all__ = ["chunk_gated_delta_rule_bwd", "chunk_kda_bwd"]

SEGMENT = 16  # chunks whose states are kept at a time
NORM_EPS = 1e-6
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


class Inputs(NamedTuple):
    """The inputs of some tokens: q and k [tokens, H, K] as passed, the others per value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor


class Options(NamedTuple):
    scale: float
    normalise: bool
    head_grouping: str


class Parts(NamedTuple):
    """A chunk in the form above. `pairs` [i, j, HV, 1 or K] has the decay from token j to token i, 0 for j > i."""

    q: Tensor
    k: Tensor
    beta: Tensor
    pairs: Tensor
    read: Tensor
    write: Tensor
    last: Tensor
    L: Tensor
    P: Tensor


def products(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
    """Returns a_i . b_j with the decay from j to i, as [i, j, HV]."""
    if pairs.shape[-1] == 1:
        return torch.einsum("ihk,jhk->ijh", a, b) * pairs[..., 0]
    return torch.einsum("ihk,jhk,ijhk->ijh", a, b, pairs)


def sums(weights: Tensor, x: Tensor, pairs: Tensor, over: str) -> Tensor:
    """Sums weights [i, j, HV] times x, with the decay of each pair, over tokens j (the result is i's) or i."""
    kept = "i" if over == "j" else "j"
    if pairs.shape[-1] == 1:
        return torch.einsum(f"ijh,{over}hk->{kept}hk", weights * pairs[..., 0], x)
    return torch.einsum(f"ijhk,{over}hk->{kept}hk", weights[..., None] * pairs, x)


def parts_of(x: Inputs, options: Options) -> Parts:
    dtype, value_heads = compute_dtype(x.q), x.v.shape[1]
    q, k = x.q.to(dtype), x.k.to(dtype)
    if options.normalise:
        q, k = l2norm(q), l2norm(k)
    q, k = (per_value_head(each[None], value_heads, options.head_grouping)[0] for each in (options.scale * q, k))
    c = x.g.to(dtype).clamp(min=LOWEST_LOG_DECAY).cumsum(0)
    above = torch.ones(len(c), len(c), dtype=torch.bool, device=c.device).triu(1)[:, :, None, None]
    pairs = (c[:, None] - c[None]).masked_fill(above, -torch.inf).exp()
    strictly = products(k, k, pairs).permute(2, 0, 1).tril(-1).permute(1, 2, 0)
    write = (c[-1] - c).exp()
    return Parts(q, k, x.beta.to(dtype)[..., None], pairs, c.exp(), write, c[-1].exp(), strictly, products(q, k, pairs))


def inverse_of(parts: Parts) -> Tensor:
    """Returns (I + beta L)^-1 as [HV, i, j]."""
    A = (parts.beta[:, None, :, 0] * parts.L).permute(2, 0, 1)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(A + identity, identity.expand_as(A), upper=False, unitriangular=True)


def residual_of(parts: Parts, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns r [tokens, HV, V] and the inverse."""
    inverse = inverse_of(parts)
    x = v.to(state.dtype) - torch.einsum("ihk,hkv->ihv", parts.k * parts.read, state)
    u = torch.einsum("hij,jhv->ihv", inverse, parts.beta * x)
    return x - torch.einsum("ijh,jhv->ihv", parts.L, u), inverse


def state_after(parts: Parts, r: Tensor, state: Tensor) -> Tensor:
    return parts.last[..., None] * state + torch.einsum("ihk,ihv->hkv", parts.k * parts.write, parts.beta * r)


def decay_gradients(parts: Parts, dP: Tensor, dL: Tensor, reads: Tensor, writes: Tensor, last: Tensor) -> Tensor:
    """Returns dg [tokens, HV, 1 or K] from the terms of everything that a decay multiplies; none cancels another.

    Token t's decay multiplies reads of the state from t on, writes before t to the state after the chunk, that state,
    and each product of a token from t on with one before t.
    """
    per_head = parts.pairs.shape[-1] == 1
    if per_head:
        terms = (dP * parts.P + dL * parts.L)[..., None]
        reads, writes, last = (x.sum(-1, keepdim=True) for x in (reads, writes, last))
    else:
        k_terms = dP[..., None] * parts.q[:, None] + dL[..., None] * parts.k[:, None]
        terms = k_terms * parts.k[None] * parts.pairs
    size = len(terms)
    after = torch.ones(size, size, dtype=terms.dtype, device=terms.device).tril()[:, :, None, None]
    before = pad(terms.cumsum(1), (0, 0, 0, 0, 1, 0))[:, :-1]  # [i, t]: the sum over j < t
    earlier = pad(writes.cumsum(0), (0, 0, 0, 0, 1, 0))[:-1]
    return (before * after).sum(0) + reads.flip(0).cumsum(0).flip(0) + earlier + last


class FormGradients(NamedTuple):
    """The gradients of a chunk's matrix form. `reads` and `writes` are those of q, k and k with their decays."""

    L: Tensor
    P: Tensor
    q_reads: Tensor
    k_reads: Tensor
    writes: Tensor
    last: Tensor


def chunk_bwd_dv_local(parts: Parts, do: Tensor) -> Tensor:
    """Returns the part of du that comes from the outputs of the same chunk."""
    return torch.einsum("ijh,ihv->jhv", parts.P, do)


def chunk_gated_delta_rule_bwd_dhu(
    parts: Parts, inverse: Tensor, do: Tensor, du: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor]:
    """Completes du, and returns the gradient of the state before the chunk with it."""
    du = torch.einsum("hij,ihv->jhv", inverse, du + torch.einsum("jhk,hkv->jhv", parts.k * parts.write, dstate))
    dstate = parts.last[..., None] * dstate + torch.einsum("ihk,ihv->hkv", parts.q * parts.read, do)
    return du, dstate - torch.einsum("ihk,ihv->hkv", parts.k * parts.read, parts.beta * du)


def prepare_wy_repr_bwd(parts: Parts, r: Tensor, do: Tensor, du: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dv, dbeta, dL and dP."""
    dv, u = parts.beta * du, parts.beta * r
    dP = torch.einsum("ihv,jhv->hij", do, u).tril().permute(1, 2, 0)
    dL = -torch.einsum("ihv,jhv->hij", dv, u).tril(-1).permute(1, 2, 0)
    return dv, (du * r).sum(-1), dL, dP


def chunk_bwd_dqkwg(
    parts: Parts, r: Tensor, do: Tensor, du: Tensor, state: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q and k as they read the state, of k as it writes it, and of `last`."""
    q_terms = torch.einsum("ihv,hkv->ihk", do, state)
    k_terms = -torch.einsum("ihv,hkv->ihk", parts.beta * du, state)
    return q_terms, k_terms, torch.einsum("ihv,hkv->ihk", parts.beta * r, dstate), (state * dstate).sum(-1)


def chunk_bwd_intra(parts: Parts, form: FormGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dg of each value head."""
    q_reads, k_reads, writes = form.q_reads * parts.read, form.k_reads * parts.read, form.writes * parts.write
    dq = q_reads + sums(form.P, parts.k, parts.pairs, over="j")
    dk = k_reads + writes + sums(form.L, parts.k, parts.pairs, over="j")
    dk = dk + sums(form.L, parts.k, parts.pairs, over="i") + sums(form.P, parts.q, parts.pairs, over="i")
    reads, last = parts.q * q_reads + parts.k * k_reads, parts.last * form.last
    return dq, dk, decay_gradients(parts, form.P, form.L, reads, parts.k * writes, last)


def key_gradients(x: Tensor, dx: Tensor, options: Options) -> Tensor:
    """Sums gradients [tokens, HV, K] over the value heads of each key head, and takes the norm back."""
    heads = x.shape[1]
    grouped = (
        dx.unflatten(1, (-1, heads)).sum(1) if options.head_grouping == "tiled" else dx.unflatten(1, (heads, -1)).sum(2)
    )
    if not options.normalise:
        return grouped
    x = x.to(dx.dtype)
    factor = (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    y = factor * x
    return factor * (grouped - y * (y * grouped).sum(-1, keepdim=True))


def chunk_gradients(
    x: Inputs, options: Options, r: Tensor, inverse: Tensor, state: Tensor, dstate: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Returns dq, dk, dv, dg and dbeta of a chunk, and the gradient of the state before it."""
    parts, do = parts_of(x, options), x.do.to(state.dtype)
    du, before = chunk_gated_delta_rule_bwd_dhu(parts, inverse, do, chunk_bwd_dv_local(parts, do), dstate)
    dv, dbeta, dL, dP = prepare_wy_repr_bwd(parts, r, do, du)
    form = FormGradients(dL, dP, *chunk_bwd_dqkwg(parts, r, do, du, state, dstate))
    dq, dk, dg = chunk_bwd_intra(parts, form)
    dq, dk = key_gradients(x.q, options.scale * dq, options), key_gradients(x.k, dk, options)
    return [dq, dk, dv, dg, dbeta], before


def sequence_gradients(
    x: Inputs, options: Options, state: Tensor, dstate: Tensor, chunk_size: int, out: list[Tensor]
) -> Tensor:
    """Writes the gradients of a sequence into `out`, and returns that of its initial state.

    It keeps one state per segment of chunks, and computes the others again.
    """
    tokens = len(x.q)
    length = SEGMENT * chunk_size
    starts = []
    for first in range(0, tokens, chunk_size):
        if first % length == 0:
            starts.append(state)
        state = step(Inputs(*(each[first : first + chunk_size] for each in x)), options, state)[0]
    for segment in reversed(range(len(starts))):
        state, kept = starts[segment], []
        spans = [slice(at, min(at + chunk_size, tokens)) for at in range(segment * length, tokens, chunk_size)][
            :SEGMENT
        ]
        for span in spans:
            after, r, inverse = step(Inputs(*(each[span] for each in x)), options, state)
            kept.append((span, r, inverse, state))
            state = after
        for span, r, inverse, before in reversed(kept):
            result, dstate = chunk_gradients(Inputs(*(each[span] for each in x)), options, r, inverse, before, dstate)
            for to, each in zip(out, result, strict=True):
                to[span] = each.to(to.dtype)
    return dstate


def step(x: Inputs, options: Options, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = parts_of(x, options)
    r, inverse = residual_of(parts, x.v, state)
    return state_after(parts, r, state), r, inverse


def gradients(
    inputs: Inputs, dht: Tensor | None, options: Options, initial_state: Tensor | None, state_v_first: bool,
    cu_seqlens: Tensor | None, chunk_size: int,
) -> Gradients:  # fmt: skip
    q, v = inputs.q, inputs.v
    dtype = compute_dtype(q)
    batch, tokens, value_heads, V = v.shape
    count = batch if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = torch.zeros(count, value_heads, q.shape[-1], V, dtype=dtype, device=q.device)
    states = zeros if initial_state is None else key_first(initial_state, state_v_first).to(dtype)
    dstates = zeros.clone() if dht is None else key_first(dht, state_v_first).to(dtype, copy=True)
    out = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in inputs[:3]]
    out += [torch.zeros(each.shape, dtype=dtype, device=q.device) for each in (inputs.g, inputs.beta)]
    for n, b, first, last, _ in sequences(batch, tokens, cu_seqlens):
        here = Inputs(*(each[b, first:last] for each in inputs))
        dstates[n] = sequence_gradients(
            here, options, states[n], dstates[n], chunk_size, [each[b, first:last] for each in out]
        )
    dq, dk, dv, dg, dbeta = out
    dinitial_state = None if initial_state is None else key_first(dstates, state_v_first).contiguous()
    return dq, dk, dv, dg, dbeta, dinitial_state


def chunk_kda_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, dht: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, head_grouping: str = "block", chunk_size: int = 16,
) -> Gradients:  # fmt: skip
    """Returns the gradients of `chunk_kda` with final gates."""
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm_in_kernel, head_grouping)
    return gradients(Inputs(q, k, v, g, beta, do), dht, options, initial_state, state_v_first, cu_seqlens, chunk_size)


def chunk_gated_delta_rule_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, dht: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, head_grouping: str = "block", chunk_size: int = 64,
) -> Gradients:  # fmt: skip
    """Returns the gradients of `chunk_gated_delta_rule` with final gates: those of a decay that all channels share."""
    result = chunk_kda_bwd(
        q, k, v, g[..., None], beta, do, dht, scale, initial_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, head_grouping, chunk_size,
    )  # fmt: skip
    return *result[:3], result[3][..., 0], *result[4:]
