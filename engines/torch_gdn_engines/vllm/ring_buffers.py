"""The tail and sinks of requests whose pages hold codes: rows of keys and values as the model computed them.

Each layer has a pool [slots, rows, KV heads, D]. A request has the same slots in all layers. The first rows of a slot
are sinks: the first tokens of a prompt. They belong to the block of these tokens, so requests with the same prefix
share them. The other rows are a ring of a request's newest tokens. Every token also has codes in its pages, so a
request can lose its slot at any time. Attention then reads its older tokens from codes. A preempted request loses its
slot if another request takes it. If a batch has more requests than there are slots, some of them have none. A cached
prefix has no ring.

This module also allocates the means of keys, because they are computed from these rows. A tile of 128 keys is 128 slots
of one block. Requests that share a block share its means.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn.aura.coded_tensor import has_tile_means
from torch_gdn.reference.aura import TILE

logger = logging.getLogger(__name__)
TAIL, SINKS, REQUESTS = 128, 4, 32  # defaults of additional_config
MOST_TAIL, MOST_SINKS, MOST_REQUESTS = 4096, 16, 1 << 16  # a block has 16 tokens or more: all sinks are in the first


@dataclass(frozen=True)
class Layout:
    """`drafts` is the number of tokens that a step may take back. The ring has room for them behind the tail."""

    sinks: int
    tail: int
    drafts: int = 0
    slots: int = REQUESTS

    @property
    def ring(self) -> int:
        return -(-(self.tail + 2 * self.drafts + 1) // 16) * 16  # a draft model is ahead by as many tokens

    @property
    def rows(self) -> int:
        return self.sinks + self.ring


def layout_of(vllm_config: Any) -> Layout | None:
    """Returns what additional_config asks for, or None if it asks for neither a tail nor sinks."""

    def option(name: str, default: int, least: int, most: int) -> int:
        value = options.get(name, default) if isinstance(options, dict) else default
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"additional_config: {name}: expected a number from {least} to {most}, got {value!r}")
        return value

    options = vllm_config.additional_config
    tail, sinks = option("aura_tail", TAIL, 0, MOST_TAIL), option("aura_sinks", SINKS, 0, MOST_SINKS)
    requests = min(option("aura_requests", REQUESTS, 1, MOST_REQUESTS), vllm_config.scheduler_config.max_num_seqs)
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    return Layout(sinks, tail, drafts, requests) if tail + sinks > 0 else None


@dataclass
class Step:
    """Where a batch reads and writes exact rows. The tensors are on the device."""

    slots: Tensor  # [N]
    starts: Tensor  # [N]
    sink_slots: Tensor  # [N]
    new_rows: Tensor  # [T]: where the tokens of the batch go in a pool [slots * rows, ..]; negative: nowhere


@dataclass
class Scheduled:
    """A request of a batch."""

    name: str
    first: int  # tokens before this step
    count: int  # tokens of this step
    block: int  # the block of its first token, or 0 if it is unknown


@dataclass
class Ring:
    slot: int
    start: int  # the first token that was written into the slot
    end: int  # the token after the last one


class SlotPool:
    """Divides `count` slots among owners. `slots` begins with the owner that was used least recently."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.slots: dict[Any, int] = {}

    def touch(self, owners: Iterable[Any]) -> None:
        for each in owners:
            if each in self.slots:
                self.slots[each] = self.slots.pop(each)

    def release(self, owner: Any) -> None:
        if owner in self.slots:
            self.free.append(self.slots.pop(owner))

    def take(self, owner: Any, batch: set[Any]) -> int:
        """Returns the owner's slot. An owner without one gets a free slot, or else that of the oldest owner. Returns -1
        if all slots belong to the batch."""
        if owner not in self.slots:
            oldest = next(iter(self.slots), None)
            if not self.free and oldest in batch:
                return -1
            self.slots[owner] = self.free.pop() if self.free else self.slots.pop(oldest)
        return self.slots[owner]


class Slots:
    """Gives rings to requests and sinks to blocks."""

    def __init__(self, layout: Layout, most: int, device: torch.device) -> None:
        """`most` is the largest number of requests in a batch."""
        self.layout = layout
        self.rings, self.sinks = SlotPool(layout.slots), SlotPool(layout.slots)
        self.ring_of_request: dict[str, Ring] = {}
        self.numbers = torch.full((3 * most,), -1, dtype=torch.int32, device=device)  # the parts of a Step, one by one

    def release(self, requests: Iterable[str]) -> None:
        for request in requests:
            self.rings.release(request)
            self.ring_of_request.pop(request, None)

    def begin_step(self, batch: Sequence[Scheduled]) -> None:
        """Gives a ring to each request of the batch, and sinks to its first block, while there are any."""
        names, blocks = {each.name for each in batch}, {each.block for each in batch}
        self.rings.touch(each.name for each in batch)
        self.sinks.touch(each.block for each in batch)
        rings = [self.ring_of(each, names) for each in batch]
        sinks = [self.sinks_of(each, blocks) for each in batch]
        parts = [ring.slot for ring in rings], [ring.start for ring in rings], sinks
        slots, starts, sink_slots = (torch.tensor(part, dtype=torch.int32) for part in parts)
        numbers = [slots, starts, sink_slots]
        if self.layout.drafts == 0:  # else a drafter changes the batch on the device
            ends = torch.tensor([0, *(each.count for each in batch)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            seq_lens = torch.tensor([each.first + each.count for each in batch], dtype=torch.int32)
            numbers.append(rows_of(ends, seq_lens, slots, sink_slots, int(ends[-1]), self.layout).int())
        joined = torch.cat(numbers)
        self.numbers = torch.empty_like(joined, device=self.numbers.device)
        torch_gdn.copy_from_host_(self.numbers, joined)

    def ring_of(self, request: Scheduled, names: set[str]) -> Ring:
        """Returns the request's ring. Its tokens stay valid if the request continues where it stopped, less rejected
        drafts. Otherwise the ring starts anew."""
        ring = self.ring_of_request.get(request.name) if request.name in self.rings.slots else None
        slot, first = self.rings.take(request.name, names), request.first
        if ring is None or not ring.end - self.layout.drafts <= first <= ring.end:
            ring = self.ring_of_request[request.name] = Ring(slot, first, first)
        ring.end = first + request.count
        return ring

    def sinks_of(self, request: Scheduled, blocks: set[int]) -> int:
        """Returns the slot of the request's sinks, or -1. Only a request that starts at its first token gets a new
        slot."""
        if request.block == 0:
            return -1
        if request.first > 0:
            return self.sinks.slots.get(request.block, -1)
        return self.sinks.take(request.block, blocks)

    def step(self, cu_seqlens: Tensor, seq_lens: Tensor, tokens: int) -> Step:
        """Returns what the batch of the last `begin_step` needs, for the last tokens of its requests."""
        places, rows = self.numbers.tensor_split([3 * seq_lens.shape[0]])
        slots, starts, sink_slots = places.chunk(3)
        if rows.shape[0] != tokens:
            rows = rows_of(cu_seqlens, seq_lens, slots, sink_slots, tokens, self.layout)
        return Step(slots, starts, sink_slots, rows)


def rows_of(
    cu_seqlens: Tensor, seq_lens: Tensor, slots: Tensor, sink_slots: Tensor, tokens: int, layout: Layout
) -> Tensor:
    """Returns the row of each token, an index into [slots * rows]. It is -1 if the request has no slot, or if a newer
    token of the batch takes the row."""
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ends = cu_seqlens[1:]
    request = torch.searchsorted(ends, token, right=True).clamp(max=seq_lens.shape[0] - 1)
    from_end = ends[request] - token
    position = seq_lens[request] - from_end
    is_sink = position < layout.sinks
    row = torch.where(is_sink, position, layout.sinks + position % layout.ring)
    slot = torch.where(is_sink, sink_slots[request], slots[request])
    is_kept = (slot >= 0) & (from_end > 0) & (is_sink | (from_end <= layout.ring))
    return torch.where(is_kept, slot.long() * layout.rows + row, -1)


@dataclass
class LayerRows:
    """The pool of a layer, and the slots that all layers share."""

    keys: Tensor  # [slots, rows, KV heads, D]
    values: Tensor
    slots: Slots

    def arguments(self, step: Step, key: Tensor, value: Tensor) -> dict[str, Any]:
        """Returns arguments of `aura_paged_attention`."""
        return {
            "exact_keys": self.keys,
            "exact_values": self.values,
            "exact_slots": step.slots,
            "exact_starts": step.starts,
            "exact_sink_slots": step.sink_slots,
            "new_keys": key,
            "new_values": value,
            "exact_sinks": self.slots.layout.sinks,
            "tail": self.slots.layout.tail,
        }

    def find_means(self, m: Any, key: Tensor, tile_means: Tensor) -> None:
        """Computes the means of the tiles that begin in this batch. `m` is a PagedMetadata."""
        layout = self.slots.layout
        sequences = (m.block_table, m.cu_seqlens, m.seq_lens)
        rows, sizes = (self.keys, m.exact.slots, m.exact.starts), (m.max_query_len, m.max_seq_len)
        torch_gdn.aura_paged_tile_means(key, tile_means, *sequences, *rows, *sizes, layout.sinks, layout.tail)

    def write(self, step: Step, key: Tensor, value: Tensor) -> None:
        torch_gdn.reshape_and_cache(key, value, self.keys, self.values, step.new_rows)


def coded_layers(vllm_config: Any, shared: bool = False) -> list[Any]:
    """Returns the layers that write codes, or those that read the codes of another layer."""
    from torch_gdn_engines.vllm.aura_attention import AuraPagedAttention

    layers = vllm_config.compilation_config.static_forward_context.values()
    result = [layer for layer in layers if isinstance(getattr(layer, "impl", None), AuraPagedAttention)]
    return [each for each in result if (each.impl.kv_sharing_target_layer_name is not None) == shared]


def bytes_of_pools(vllm_config: Any) -> int:
    layout = layout_of(vllm_config)
    if layout is None:
        return 0
    values = sum(2 * each.impl.num_kv_heads * each.impl.head_size for each in coded_layers(vllm_config))
    return int(values * layout.slots * layout.rows * vllm_config.model_config.dtype.itemsize)


def wants_means(vllm_config: Any) -> bool:
    """Returns whether keys have means, if blocks are whole tiles."""
    options, layout = vllm_config.additional_config, layout_of(vllm_config)
    return isinstance(options, dict) and "aura" in options and layout is not None and has_tile_means(layout.tail)


def share_of_means(vllm_config: Any) -> float:
    """Returns the bytes of means per byte of the pools. It is an upper bound, because blocks may have padding."""
    if not wants_means(vllm_config):
        return 0.0
    impls = [each.impl for each in coded_layers(vllm_config)]
    mean_shares = (2 * each.head_size / (TILE * each.scheme.bytes_per_token(each.head_size)) for each in impls)
    return max(mean_shares, default=0.0)


def allocate(vllm_config: Any, device: torch.device) -> Slots | None:
    """Allocates exact rows and means for each layer with codes. Returns None if there is no such layer, or if a request
    has neither tail nor sinks."""
    layout, layers = layout_of(vllm_config), coded_layers(vllm_config)
    if layout is None or not layers:
        return None
    slots = Slots(layout, vllm_config.scheduler_config.max_num_seqs, device)
    sizes_without_means = set()
    for each in layers:
        shape = (layout.slots, layout.rows, each.impl.num_kv_heads, each.impl.head_size)
        keys, values = (torch.zeros(shape, dtype=vllm_config.model_config.dtype, device=device) for _ in range(2))
        each.impl.exact = LayerRows(keys, values, slots)
        blocks, block_size, heads, _ = each.impl.parts(each.kv_cache)[0].shape
        if wants_means(vllm_config) and block_size % TILE == 0:
            sizes = (blocks, block_size // TILE, heads, each.impl.head_size)
            each.impl.tile_means = torch.zeros(sizes, dtype=torch.float16, device=device)
        elif wants_means(vllm_config):
            sizes_without_means.add(block_size)
    for block_size in sizes_without_means:
        logger.warning("aura: keys have no means in blocks of %d tokens: a multiple of 128 has them", block_size)
    layers_by_name = vllm_config.compilation_config.static_forward_context
    for each in coded_layers(vllm_config, shared=True):
        each.impl.tile_means = layers_by_name[each.impl.kv_sharing_target_layer_name].impl.tile_means
    return slots


def copy_means(vllm_config: Any, blocks: Sequence[tuple[int, int]]) -> None:
    """Copies the means of blocks whose codes vLLM has copied. `blocks` has pairs of source and target."""
    for each in coded_layers(vllm_config):
        means = each.impl.tile_means
        if means is not None:
            source, target = torch.tensor(blocks).to(means.device).unbind(1)
            means[target] = means[source]


def group_with_first_blocks(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Returns a group of layers that see all tokens, because layers with a window lose their first blocks."""
    layers = vllm_config.compilation_config.static_forward_context
    coded = coded_layers(vllm_config)
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        grouped = [layers.get(name) for name in group.layer_names]
        if any(each in coded and each.impl.window == 0 for each in grouped):
            return i
    return None


class KeepsExactRows:
    """A base class for a model runner. It comes before vLLM's V1 model runner in the order of base classes."""

    vllm_config: Any
    device: torch.device
    input_batch: Any
    exact_slots: Slots | None = None
    group_of_sinks: int | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        runner: Any = super()
        runner.initialize_kv_cache(*args, **kwargs)
        own: Any = self
        self.exact_slots = allocate(self.vllm_config, self.device)
        self.group_of_sinks = group_with_first_blocks(self.vllm_config, own.kv_cache_config)

    def _update_states(self, scheduler_output: Any) -> Any:
        runner: Any = super()
        result = runner._update_states(scheduler_output)
        if self.exact_slots is not None:
            self.exact_slots.release(scheduler_output.finished_req_ids)
            if getattr(scheduler_output, "kv_cache_block_copies", None):  # a block may have a copy of others' tokens
                self.exact_slots.sinks = SlotPool(self.exact_slots.layout.slots)
                copy_means(self.vllm_config, scheduler_output.kv_cache_block_copies)
            self.exact_slots.begin_step(self.scheduled(scheduler_output.num_scheduled_tokens))
        return result

    def scheduled(self, counts: dict[str, int]) -> list[Scheduled]:
        names = self.input_batch.req_ids
        computed = self.input_batch.num_computed_tokens_cpu[: len(names)].tolist()
        if self.group_of_sinks is None:
            blocks = [0] * len(names)
        else:
            table = self.input_batch.block_table[self.group_of_sinks].get_numpy_array()
            blocks = table[: len(names), 0].tolist()
        return [Scheduled(r, n, counts[r], block) for r, n, block in zip(names, computed, blocks, strict=True)]
