"""Runs one step of a server's batch in place on pools of states: sequences with one new token first, then prompts.

Each sequence has a slot in the pool of convolution columns and in the pool of states. The two kinds of sequences take
two kernels of the delta rule, which write one buffer. Before the first batch, calls of the layers show which kernels
to compile. This module knows no engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

import torch_gdn
from torch_gdn import self_test
from torch_gdn._recorder import KernelVariant, recording


@dataclass(frozen=True)
class Batch:
    """The N sequences of a step. Index tensors are on the device."""

    state_indices: Tensor  # [N], each sequence's slot
    sequences: int  # N
    decodes: int  # the first sequences, with one token and a state from earlier tokens
    null_index: int = -1  # slots at or below it are padding
    # The remaining fields are read only if decodes < N.
    has_initial_state: Tensor | None = None  # [N] bool; if False, the state starts from zero
    cu_seqlens: Tensor | None = None  # [N + 1]
    prefill_cu_seqlens: Tensor | None = None  # [N - decodes + 1], boundaries of the prompts alone; begins with 0
    checkpoint_offsets: Tensor | None = None  # [N], as in chunk_gated_delta_rule_
    checkpoint_indices: Tensor | None = None  # [N]
    # A step of drafts has a token and its drafts per sequence, no other tokens, and state_indices [N, 1 + drafts].
    num_accepted_tokens: Tensor | None = None  # [N], of the last step


@dataclass
class PagedBatch:
    """The N sequences of a step whose attention reads pages. The tensors are on the device."""

    block_table: Tensor  # [N, M]
    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    max_query_len: int
    max_seq_len: int

    @property
    def sequences(self) -> dict[str, Any]:
        """Returns these fields, not a subclass's, as arguments of `paged_attention` and `aura_paged_attention`."""
        return {field.name: getattr(self, field.name) for field in fields(PagedBatch)}


def attends_to_heads(size: int) -> bool:
    """Returns whether `paged_attention` takes heads of this size."""
    return size % 16 == 0 and 16 <= size <= 256


def convolve(
    batch: Batch, x: Tensor, weight: Tensor, pool: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Convolves x [T, D], the tokens of all sequences. `pool` is [slots, D, W - 1]. Returns [T, D]."""
    slots = batch.state_indices if batch.num_accepted_tokens is None else batch.state_indices[:, 0]
    options: dict[str, Any] = {"null_index": batch.null_index, "bias": bias, "activation": activation}
    if batch.decodes == batch.sequences and batch.num_accepted_tokens is None:
        return torch_gdn.causal_conv1d_update_(x[:, None], weight, pool, slots, **options)[:, 0]
    y = torch_gdn.causal_conv1d_update_(
        x[None],
        weight,
        pool,
        slots,
        batch.has_initial_state,
        cu_seqlens=batch.cu_seqlens,
        num_accepted_tokens=batch.num_accepted_tokens,
        checkpoint_offsets=batch.checkpoint_offsets,
        checkpoint_indices=batch.checkpoint_indices,
        **options,
    )
    return y[0]


def delta_rule(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    out: Tensor,
    **options: Any,
) -> None:
    """Inputs are [T, heads, size] or [T, heads]. `out` is [T, HV, V]. `options` are those of both in-place ops."""
    inputs, slots, first = (q, k, v, g, beta), batch.state_indices, batch.decodes
    options["null_index"] = batch.null_index
    recurrent: Any = torch_gdn.fused_recurrent_gated_delta_rule_
    chunked: Any = torch_gdn.chunk_gated_delta_rule_
    if batch.num_accepted_tokens is not None:
        drafts = {"cu_seqlens": batch.cu_seqlens, "num_accepted_tokens": batch.num_accepted_tokens}
        rows = (x[None] for x in inputs)
        recurrent(*rows, pool, slots, out=out[None], **drafts, **options)
        return
    if first:
        rows = (x[:first, None] for x in inputs)
        recurrent(*rows, pool, slots[:first], out=out[:first, None], **options)
    if first < batch.sequences:
        chunked(
            *(x[None, first:] for x in inputs),
            pool,
            slots[first:],
            rest(batch.has_initial_state, first),
            cu_seqlens=batch.prefill_cu_seqlens,
            out=out[None, first:],
            checkpoint_offsets=rest(batch.checkpoint_offsets, first),
            checkpoint_indices=rest(batch.checkpoint_indices, first),
            **options,
        )


def rest(x: Tensor | None, first: int) -> Tensor | None:
    return None if x is None else x[first:]


def working_variants(calls: Callable[[], None]) -> list[KernelVariant]:
    """Returns what the calls launch, now that kernels which failed before on this machine are replaced."""
    self_test.load()
    with recording() as recorded:
        calls()
    return recorded.variants
