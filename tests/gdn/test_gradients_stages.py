"""Compares each stage of the reference's gradients, and all of them together, with numerical derivatives in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, gradcheck

from torch_gdn.reference import gradients as stages
from torch_gdn.reference.common import per_value_head
from torch_gdn.reference.layers import l2norm
from torch_gdn_check.registry.drawing import drawing

TOKENS, H, HV, K, V = 3, 1, 2, 2, 3
STATE = (HV, K, V)
OPTIONS = stages.Options(0.7, True, "block")
heads_and_channels = pytest.mark.parametrize("width", [1, K], ids=["head", "channels"])


class Stage(Function):
    """A forward function, with a stage as its backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.back = back
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> Any:
        result = ctx.back(*ctx.saved_tensors, *output_grads)
        return None, None, *((result,) if isinstance(result, Tensor) else result)


def check(run: Callable[..., Any], back: Callable[..., Any], *inputs: Tensor) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    assert gradcheck(lambda *x: Stage.apply(run, back, *x), leaves, fast_mode=True)


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def inputs(width: int, tokens: int = TOKENS) -> stages.Inputs:
    log_decays, beta = -draw(tokens, HV, width).abs(), draw(tokens, HV).sigmoid()
    return stages.Inputs(draw(tokens, H, K), draw(tokens, H, K), draw(tokens, HV, V), log_decays, beta, draw(0))


@pytest.fixture
def x(width: int) -> stages.Inputs:
    with drawing(1):
        return inputs(width)


def form_of(parts: stages.Parts) -> tuple[Tensor, ...]:
    """The matrix form, in the order of the gradients."""
    return parts.L, parts.P, parts.q * parts.read, parts.k * parts.read, parts.k * parts.write, parts.last


def rule(form: tuple[Tensor, ...], beta: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o, the state after the chunk and r, token by token."""
    L, P, q_read, k_read, k_write, last = form
    r = v - torch.einsum("ihk,hkv->ihv", k_read, state)
    rows: list[Tensor] = []
    for i, row in enumerate(r):
        rows.append(row - sum((L[i, j, :, None] * beta[j] * rows[j] for j in range(i)), torch.zeros_like(row)))
    r = torch.stack(rows)
    o = torch.einsum("ihk,hkv->ihv", q_read, state) + torch.einsum("ijh,jhv->ihv", P, beta * r)
    return o, last[..., None] * state + torch.einsum("ihk,ihv->hkv", k_write, beta * r), r


@heads_and_channels
def test_chunk_bwd_dv_local(x: stages.Inputs) -> None:
    parts = stages.parts_of(x, OPTIONS)
    check(
        lambda u: torch.einsum("ijh,jhv->ihv", parts.P, u),
        lambda _, do: stages.chunk_bwd_dv_local(parts, do),
        x.v,
    )


@heads_and_channels
def test_chunk_gated_delta_rule_bwd_dhu(x: stages.Inputs) -> None:
    """du is the gradient of v before beta multiplies it."""
    parts = stages.parts_of(x, OPTIONS)
    inverse = stages.inverse_of(parts)

    def back(v: Tensor, state: Tensor, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        local = stages.chunk_bwd_dv_local(parts, do)
        du, dbefore = stages.chunk_gated_delta_rule_bwd_dhu(parts, inverse, do, local, dstate)
        return parts.beta * du, dbefore

    check(lambda v, state: rule(form_of(parts), parts.beta, v, state)[:2], back, x.v, draw(*STATE))


@heads_and_channels
def test_prepare_wy_repr_bwd_and_chunk_bwd_dqkwg(x: stages.Inputs) -> None:
    """The gradients of v, beta and every part of the form, from those of o and of the state after the chunk."""
    parts, state = stages.parts_of(x, OPTIONS), draw(*STATE)
    inverse = stages.inverse_of(parts)

    def run(v: Tensor, beta: Tensor, L: Tensor, P: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        lower = (each.permute(2, 0, 1) for each in (L, P))
        L, P = (each.tril(-1 + n).permute(1, 2, 0) for n, each in enumerate(lower))
        return rule((L, P, *others), beta[..., None], v, state)[:2]

    def back(v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        do, dstate = others[-2:]
        r = rule(form_of(parts), parts.beta, v, state)[2]
        local = stages.chunk_bwd_dv_local(parts, do)
        du, _ = stages.chunk_gated_delta_rule_bwd_dhu(parts, inverse, do, local, dstate)
        dv, dbeta, dL, dP = stages.prepare_wy_repr_bwd(parts, r, do, du)
        return dv, dbeta, dL, dP, *stages.chunk_bwd_dqkwg(parts, r, do, du, state, dstate)

    last = parts.last.expand(HV, K)
    check(run, back, x.v, x.beta, *form_of(parts)[:-1], last)


@heads_and_channels
def test_chunk_bwd_intra(x: stages.Inputs) -> None:
    """The gradients of q, k and the log decays, of each value head, from those of the form."""
    options = OPTIONS._replace(scale=1.0, normalise=False)

    def form(q: Tensor, k: Tensor, g: Tensor) -> stages.Parts:
        return stages.parts_of(x._replace(q=q, k=k, g=g), options)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        return *form_of(form(*leaves))[:-1], form(*leaves).last.expand(HV, K)

    def back(q: Tensor, k: Tensor, g: Tensor, dL: Tensor, *form_tensors: Tensor) -> tuple[Tensor, ...]:
        strictly = dL.permute(2, 0, 1).tril(-1).permute(1, 2, 0)
        return stages.chunk_bwd_intra(form(q, k, g), stages.FormGradients(strictly, *form_tensors))

    check(run, back, draw(TOKENS, HV, K), draw(TOKENS, HV, K), x.g)


@pytest.mark.parametrize("head_grouping", ["block", "tiled"])
@pytest.mark.parametrize("normalise", [False, True])
def test_chunk_bwd_keys(head_grouping: str, normalise: bool) -> None:
    options = OPTIONS._replace(normalise=normalise, head_grouping=head_grouping)

    def run(q: Tensor) -> Tensor:
        y = l2norm(q) if normalise else q
        return per_value_head(y[None], 4, head_grouping)[0]

    with drawing(1):
        check(run, lambda q, dq: stages.key_gradients(q, dq, options), draw(TOKENS, 2, K))


@heads_and_channels
def test_the_stages_together(x: stages.Inputs) -> None:
    """Two chunks of two tokens and one of one: the rule's own gradients, by numerical derivatives of the recurrence."""

    def run(state: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for t in range(5):  # chunks of one token
            token = stages.Inputs._make([*(each[t : t + 1] for each in leaves), draw(0)])
            parts = stages.parts_of(token, OPTIONS)
            o, state, _ = rule(form_of(parts), parts.beta, token.v, state)
            rows.append(o)
        return torch.cat(rows), state

    def back(state: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *leaves, do, dstate = rest
        out = [torch.zeros_like(each) for each in leaves]
        whole = stages.Inputs._make([*leaves, do])
        dstate = stages.sequence_gradients(whole, OPTIONS, state, dstate, 2, out)
        return dstate, *out

    with drawing(2):
        check(run, back, draw(*STATE), *inputs(x.g.shape[-1], 5)[:5])
