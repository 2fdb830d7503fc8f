"""The references share these: the chunks of a batch or of packed sequences, heads, and the dtype of the computation."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOWEST_LOG_DECAY = -104.0  # its exp is 0 in float32; minus infinity is clamped to it, and then resets too


class Span(NamedTuple):
    """Tokens x[batch, first:last] of one sequence. If they are a chunk, `row` is their row of h."""

    sequence: int
    batch: int
    first: int
    last: int
    row: int


def sequences(batch: int, tokens: int, cu_seqlens: Tensor | None) -> Iterator[Span]:
    if cu_seqlens is None:
        for b in range(batch):
            yield Span(b, b, 0, tokens, 0)
    else:
        for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
            yield Span(n, 0, first, last, 0)


def chunks(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None) -> Iterator[Span]:
    row = 0
    for sequence, b, first, last, _ in sequences(batch, tokens, cu_seqlens):
        if cu_seqlens is None:
            row = 0
        for start in range(first, last, chunk_size):
            yield Span(sequence, b, start, min(start + chunk_size, last), row)
            row += 1


def chunk_rows(tokens: int, chunk_size: int, cu_seqlens: Tensor | None, chunk_indices: Tensor | None) -> int:
    """Returns NT, the rows of h: a batch's chunks, or for packed sequences chunk_indices' length or an upper bound."""
    if chunk_indices is not None:
        return len(chunk_indices)
    surplus = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    return -(-tokens // chunk_size) + surplus


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def per_value_head(x: Tensor, value_heads: int, head_grouping: str = "block") -> Tensor:
    """Makes [B, T, HV, K] of [B, T, H, K]. A key head serves a block of HV / H value heads, or every H-th one."""
    ratio = value_heads // x.shape[2]
    return x.repeat(1, 1, ratio, 1) if head_grouping == "tiled" else x.repeat_interleave(ratio, dim=2)


def log_decay_of(g: Tensor, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Returns g itself, or -exp(A_log) softplus(g + dt_bias) of a raw g."""
    if not use_gate:
        return g
    assert A_log is not None
    raw_g = g if dt_bias is None else g + dt_bias.to(g.dtype)
    return -A_log.to(g.dtype).exp() * torch.nn.functional.softplus(raw_g)


def beta_of(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """Returns beta itself, or the sigmoid of a raw beta, perhaps doubled."""
    if not use_sigmoid:
        return beta
    return 2 * beta.sigmoid() if allow_neg_eigval else beta.sigmoid()


def key_first(state: Tensor, state_v_first: bool) -> Tensor:
    return state.transpose(-1, -2) if state_v_first else state


def gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of the inputs, by autograd through `function`, for those of its outputs."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(y, dy) for y, dy in zip(results, grad_outputs, strict=True) if dy is not None and y.requires_grad]
        given = [x for x in leaves if x is not None]
        outputs, wanted = [y for y, _ in pairs], [dy.to(y.dtype) for y, dy in pairs]
        result = iter(torch.autograd.grad(outputs, given, wanted, allow_unused=True, materialize_grads=True))
    return [None if x is None else next(result) for x in leaves]
