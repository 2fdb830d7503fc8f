"""The tail and sinks of requests whose pages hold codes: rows of keys and values as the model computed them.

Each layer has a pool [slots, rows, KV heads, D], and a request has the same slot in all of them. The first rows of a
slot are the request's first tokens, the sinks; the others are a ring of its newest tokens. Every token has codes in its
pages too, so a slot may be lost at any time: the request's next tokens fill another one, and older tokens are read from
codes. This happens to a preempted request whose slot others took, to the tokens of a cached prefix, and to the requests
of a batch that has more of them than there are slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn

TAIL, SINKS, REQUESTS = 128, 4, 32  # defaults of additional_config
MOST_TOKENS, MOST_REQUESTS = 4096, 1 << 16


@dataclass(frozen=True)
class Layout:
    """`drafts`: how many tokens a step may take back. They have overwritten rows that are older than the tail."""

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
    tail, sinks = option("aura_tail", TAIL, 0, MOST_TOKENS), option("aura_sinks", SINKS, 0, MOST_TOKENS)
    requests = min(option("aura_requests", REQUESTS, 1, MOST_REQUESTS), vllm_config.scheduler_config.max_num_seqs)
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    return Layout(sinks, tail, drafts, requests) if tail + sinks > 0 else None


@dataclass
class Step:
    """What a batch needs to read and write exact rows. The tensors are on the device."""

    slots: Tensor  # [N]
    starts: Tensor  # [N]
    new_rows: Tensor  # [T]: where the tokens of the batch go in a pool [slots * rows, ..]; negative: nowhere


@dataclass
class Held:
    slot: int
    start: int  # the first token that was written into the slot
    end: int  # behind the last one


class Slots:
    """Which request has which slot."""

    def __init__(self, layout: Layout, most: int, device: torch.device) -> None:
        """`most`: requests of a batch."""
        self.layout = layout
        self.free = list(range(layout.slots))
        self.held: dict[str, Held] = {}  # the request that was scheduled least recently comes first
        self.numbers = torch.full((2 * most,), -1, dtype=torch.int32, device=device)  # slots, then starts, of a batch

    def release(self, requests: Iterable[str]) -> None:
        for request in requests:
            if request in self.held:
                self.free.append(self.held.pop(request).slot)

    def begin_step(self, batch: Sequence[tuple[str, int, int]]) -> None:
        """Gives each request of the batch a slot, if there are enough.

        `batch` has names, tokens before this step, and tokens of this step. A request keeps the tokens of its slot if
        it goes on where it stopped, or a few rejected drafts before.
        """
        names = {request for request, _, _ in batch}
        for request, _, _ in batch:
            if request in self.held:
                self.held[request] = self.held.pop(request)
        slots, starts = [], []
        for request, first, count in batch:
            held = self.held.get(request)
            if held is None:
                held = Held(self.take(names), first, first)
                if held.slot >= 0:
                    self.held[request] = held
            elif not held.end - self.layout.drafts <= first <= held.end:
                held.start = first
            held.end = first + count
            slots.append(held.slot)
            starts.append(held.start)
        torch_gdn.copy_from_host_(self.numbers[: 2 * len(slots)], torch.tensor(slots + starts, dtype=torch.int32))

    def take(self, batch: set[str]) -> int:
        """Returns a free slot, or that of the request that waits longest; -1 if the batch has all slots."""
        if self.free:
            return self.free.pop()
        oldest = next(iter(self.held))
        return -1 if oldest in batch else self.held.pop(oldest).slot

    def step(self, cu_seqlens: Tensor, seq_lens: Tensor, tokens: int) -> Step:
        """Returns what the batch of the last `begin_step` needs, for the last tokens of its requests."""
        slots, starts = self.numbers[: 2 * seq_lens.shape[0]].chunk(2)
        return Step(slots, starts, rows_of(cu_seqlens, seq_lens, slots, tokens, self.layout))


def rows_of(cu_seqlens: Tensor, seq_lens: Tensor, slots: Tensor, tokens: int, layout: Layout) -> Tensor:
    """Returns the row of each token, an index into [slots * rows]: -1 if the request has no slot or newer tokens take
    the row."""
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ends = cu_seqlens[1:]
    request = torch.searchsorted(ends, token, right=True).clamp(max=seq_lens.shape[0] - 1)
    from_end = ends[request] - token
    position = seq_lens[request] - from_end
    is_sink = position < layout.sinks
    row = torch.where(is_sink, position, layout.sinks + position % layout.ring)
    slot = slots[request]
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
            "new_keys": key,
            "new_values": value,
            "exact_sinks": self.slots.layout.sinks,
            "tail": self.slots.layout.tail,
        }

    def write(self, step: Step, key: Tensor, value: Tensor) -> None:
        torch_gdn.reshape_and_cache(key, value, self.keys, self.values, step.new_rows)


def coded_layers(vllm_config: Any) -> list[Any]:
    """Returns the attention of each layer that writes codes."""
    from torch_gdn.integrations.vllm.aura_attention import AuraPagedAttention

    layers = vllm_config.compilation_config.static_forward_context.values()
    found = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), AuraPagedAttention)]
    return [each for each in found if each.kv_sharing_target_layer_name is None]


def bytes_of_pools(vllm_config: Any) -> int:
    layout = layout_of(vllm_config)
    if layout is None:
        return 0
    values = sum(2 * each.num_kv_heads * each.head_size for each in coded_layers(vllm_config))
    return int(values * layout.slots * layout.rows * vllm_config.model_config.dtype.itemsize)


def allocate(vllm_config: Any, device: torch.device) -> Slots | None:
    """Gives each layer with codes its pool. Returns None if there is no such layer, or neither tail nor sinks."""
    layout, layers = layout_of(vllm_config), coded_layers(vllm_config)
    if layout is None or not layers:
        return None
    slots = Slots(layout, vllm_config.scheduler_config.max_num_seqs, device)
    for each in layers:
        shape = (layout.slots, layout.rows, each.num_kv_heads, each.head_size)
        keys, values = (torch.zeros(shape, dtype=vllm_config.model_config.dtype, device=device) for _ in range(2))
        each.exact = LayerRows(keys, values, slots)
    return slots


class KeepsExactRows:
    """A base class that precedes vLLM's V1 model runner."""

    vllm_config: Any
    device: torch.device
    input_batch: Any
    exact_slots: Slots | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        runner: Any = super()
        runner.initialize_kv_cache(*args, **kwargs)
        self.exact_slots = allocate(self.vllm_config, self.device)

    def _update_states(self, scheduler_output: Any) -> Any:
        runner: Any = super()
        found = runner._update_states(scheduler_output)
        if self.exact_slots is not None:
            self.exact_slots.release(scheduler_output.finished_req_ids)
            requests, counts = self.input_batch.req_ids, scheduler_output.num_scheduled_tokens
            computed = self.input_batch.num_computed_tokens_cpu[: len(requests)].tolist()
            self.exact_slots.begin_step([(r, n, counts[r]) for r, n in zip(requests, computed, strict=True)])
        return found
