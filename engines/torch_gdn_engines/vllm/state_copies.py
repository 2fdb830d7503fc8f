"""Implements aligned prefix caching: states move from a request's running block to the block where its tokens end.

Replaces functions of vllm.v1.worker.mamba_utils. A convolution's state moves without its first `bias` columns. Of
recurrent states the one after `bias` accepted drafts moves, which has its own block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn


@dataclass(frozen=True)
class State:
    """A layer's states of one kind, a row per block: [blocks, columns, D] of a convolution, or [blocks, HV, V, K]."""

    rows: Tensor
    is_convolution: bool

    @property
    def storage(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.rows.device).set_(self.rows.untyped_storage())

    def offset(self, block: Any, bias: Any) -> Any:
        """Returns the offset in bytes, as an integer or a tensor."""
        rows = self.rows
        elements = rows.storage_offset() + block * rows.stride(0)
        return (elements + (bias * rows.stride(1) if self.is_convolution else 0)) * rows.element_size()

    def size(self, bias: Any) -> Any:
        if self.is_convolution:
            return (self.rows.shape[1] - bias) * self.rows.stride(1) * self.rows.element_size()
        return math.prod(self.rows.shape[1:]) * self.rows.element_size() + 0 * bias


def states_of(group: Any, forward_context: dict[str, Any], copy_functions: Any) -> list[State]:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, is_conv_state_dim_first
    from vllm.v1.worker.mamba_utils import _get_mamba_spec_for_layer

    if is_conv_state_dim_first():
        raise NotImplementedError("aligned prefix caching: expected the convolution layout SD, got DS")
    return [
        State(rows, function is get_conv_copy_spec)
        for name in group.layer_names
        for rows, function in zip(
            forward_context[name].kv_cache,
            copy_functions[_get_mamba_spec_for_layer(group, name).mamba_type],
            strict=False,  # a layer may have states that are never copied, behind the others
        )
    ]


def copy(copies: list[tuple[State, Any, Any, Any]]) -> None:
    """Copies (state, source byte, destination byte, bytes), numbers or tensors [n], in one dispatch per storage."""
    storages: dict[int, Tensor] = {}
    parts: dict[int, list[tuple[Any, Any, Any]]] = defaultdict(list)
    for state, *part in copies:
        storage = state.rows.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = state.storage
        parts[storage._cdata].append(tuple(part))
    for key, pool in storages.items():
        sources, destinations, sizes = (joined(column, pool.device) for column in zip(*parts[key], strict=True))
        torch_gdn.batch_copy_(pool, sources, destinations, sizes)


def joined(column: Any, device: torch.device) -> Tensor:
    if isinstance(column[0], Tensor):
        return torch.stack(column).flatten().long()
    return torch.tensor(column, dtype=torch.int64)


# Without drafts: the host knows the block numbers.


def collect(
    copy_bufs: Any,
    kv_cache_config: Any,
    mamba_state_copy_funcs: Any,
    mamba_group_ids: list[int],
    src_block_idx: int,
    dest_block_idx: int,
    accept_token_bias: int,
    req_state: Any,
    forward_context: dict[str, Any],
) -> None:
    if src_block_idx == dest_block_idx and accept_token_bias == 0:
        return
    copies = copy_bufs.__dict__.setdefault("copies", [])
    for group_id in mamba_group_ids:
        blocks = req_state.block_ids[group_id]
        group = kv_cache_config.kv_cache_groups[group_id]
        for state in states_of(group, forward_context, mamba_state_copy_funcs):
            source = blocks[src_block_idx if state.is_convolution else src_block_idx + accept_token_bias]
            copies.append(
                (
                    state,
                    state.offset(source, accept_token_bias),
                    state.offset(blocks[dest_block_idx], 0),
                    state.size(accept_token_bias),
                )
            )


def copy_collected(copy_bufs: Any) -> None:
    copies = copy_bufs.__dict__.get("copies", [])
    copy(copies)
    copies.clear()


# With drafts: only the device knows which state is the last accepted one.


def initialize(
    context: Any,
    kv_cache_config: Any,
    forward_context: dict[str, Any],
    mamba_state_copy_funcs: Any,
    block_tables: list[Tensor],
    aligned_index_block_tables: list[Tensor] | None = None,
) -> None:
    if context.is_initialized:
        return
    groups = [kv_cache_config.kv_cache_groups[group_id] for group_id in context.mamba_group_ids]
    context.tables_and_states = [
        (whole_table(table), states_of(group, forward_context, mamba_state_copy_funcs))
        for table, group in zip(block_tables, groups, strict=True)
    ]
    context.is_initialized = True


def whole_table(table: Tensor) -> Tensor:
    """Returns the table that `table` begins, with a row per request of the first step. It lives as long as vLLM."""
    rows = (table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()) // table.stride(0)
    return table.as_strided((rows, table.shape[1]), table.stride())


def copy_between_columns(context: Any, mask: Tensor, source: Tensor, destination: Tensor, bias: Tensor) -> None:
    """Copies states. `mask` is [n] bool, the others [n] are columns of block tables. Unmasked rows are not read."""
    source, destination, bias = (torch.where(mask, x.long(), 0)[:, None] for x in (source, destination, bias))
    n, copies = mask.shape[0], []
    for table, states in context.tables_and_states:
        blocks = [table[:n].gather(1, column)[:, 0].long() for column in (source, source + bias, destination)]
        for state in states:
            first = state.offset(blocks[0] if state.is_convolution else blocks[1], bias[:, 0])
            size = torch.where(mask, state.size(bias[:, 0]), 0)
            copies.append((state, first, state.offset(blocks[2], 0), size))
    copy(copies)


def copy_before_step(
    context: Any,
    num_reqs: int,
    state_idx_gpu: Tensor,
    src_col_gpu: Tensor,
    token_bias_gpu: Tensor,
    idx_mapping: Tensor | None,
) -> None:
    if idx_mapping is not None:
        raise NotImplementedError("aligned prefix caching: expected vLLM's model runner V1, got V2")
    if num_reqs == 0 or not context.is_initialized:
        return
    source, destination = src_col_gpu[:num_reqs], state_idx_gpu[:num_reqs]
    copy_between_columns(
        context, (source >= 0) & (source != destination), source, destination, token_bias_gpu[:num_reqs]
    )


def copy_after_step(
    context: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    mamba_state_idx_gpu: Tensor,
    num_scheduled_tokens_gpu: Tensor,
    num_computed_tokens_gpu: Tensor,
    num_draft_tokens_gpu: Tensor,
) -> None:
    """Copies the state at a block's end to the block if accepted tokens passed that end."""
    if num_reqs == 0 or not context.is_initialized:
        return
    accepted, source, scheduled, computed, drafts = (
        x[:num_reqs]
        for x in (
            num_accepted_tokens_gpu,
            mamba_state_idx_gpu,
            num_scheduled_tokens_gpu,
            num_computed_tokens_gpu,
            num_draft_tokens_gpu,
        )
    )
    num_tokens_seen = computed + scheduled - drafts  # tokens in the state of the source's block
    block_ends = (num_tokens_seen + accepted - 1) // context.block_size * context.block_size
    crosses, bias = block_ends >= num_tokens_seen, block_ends - num_tokens_seen
    destination = block_ends // context.block_size - 1
    same_block = crosses & (source == destination)
    context.num_accepted_tokens_out[:num_reqs] = torch.where(same_block, 1, accepted)
    copy_between_columns(context, crosses & ~(same_block & (bias == 0)), source, destination, bias)
