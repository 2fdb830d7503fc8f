"""Keeps the states of a server's requests, one slot each, and runs one step of a layer on them.

A slot holds the states and the convolution's columns of all layers, one after another, so that a copy of a request is
one range of bytes. A step's slots and boundaries go to the device once, for all layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn.integrations import serving
from torch_gdn.memory import check_memory

ALIGNMENT = 16  # bytes that `batch_copy_` moves at a time


@dataclass(frozen=True)
class StateSizes:
    """The sizes of one layer's states for one request."""

    state: tuple[int, int, int]  # [HV, K, V], in float32
    columns: tuple[int, int]  # [D, W - 1]: the convolution's channels, and the tokens that it looks back
    dtype: torch.dtype  # the columns' dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> StateSizes:
        """Reads a model's `config` by the names that all Gated DeltaNet models of transformers share."""
        HV, K, V = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * K + HV * V
        return cls((HV, K, V), (channels, config.linear_conv_kernel_dim - 1), dtype)

    @property
    def state_bytes(self) -> int:
        return align_up(math.prod(self.state) * torch.float32.itemsize)

    @property
    def layer_bytes(self) -> int:
        return self.state_bytes + align_up(math.prod(self.columns) * self.dtype.itemsize)


def align_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """A request's part in a step."""

    request: str
    past: int  # tokens before this step
    tokens: int


@dataclass(frozen=True)
class Checkpoint:
    """The states after some tokens of a part, and the extra slot that they go to."""

    tokens: int  # a multiple of 64
    slot: int


class LayerStates:
    """One layer's view of the pool."""

    def __init__(self, pool: StatePool, first_byte: int) -> None:
        sizes = pool.sizes
        self.pool = pool
        self.states = slot_view(pool, first_byte, torch.float32, sizes.state)  # [slots, HV, K, V]
        self.columns = slot_view(pool, first_byte + sizes.state_bytes, sizes.dtype, sizes.columns)  # [slots, D, W - 1]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Convolves x [1, T, D], the step's tokens."""
        return serving.convolve(self.pool.current(), x[0], weight, self.columns, bias, activation)[None]

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: None, **options: Any
    ) -> tuple[Tensor, None]:
        """Runs the rule on inputs [1, T, heads, size]."""
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        batch = self.pool.current()
        serving.delta_rule(batch, q[0], k[0], v[0], g[0], beta[0], self.states, out[0], **options)
        return out, None


class StatePool:
    """A pool of slots for requests. Free slots keep named states after prefixes.

    The host knows the owner of each slot; nothing here waits for the device.

    Args:
        layers: the indices of the model's layers that have states.
        sizes: of each of them.
        slots: the number of concurrent requests.
        device: where the states are.

    Raises:
        torch.OutOfMemoryError: If the slots do not fit into what Metal recommends.
    """

    def __init__(self, layers: Sequence[int], sizes: StateSizes, slots: int, device: torch.device) -> None:
        self.sizes, self.device, self.slots = sizes, device, slots
        self.slot_bytes = len(layers) * sizes.layer_bytes
        check_memory(f"{slots} slots of states", slots * self.slot_bytes, device)
        self.storage = torch.zeros(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self.layers = {layer: LayerStates(self, n * sizes.layer_bytes) for n, layer in enumerate(layers)}
        self.free = list(range(slots))[::-1]  # takes the last one next: without a name, or used least recently
        self.slot_of: dict[str, int] = {}
        self.slot_with: dict[int, int] = {}  # by the name of its states
        self.name_of: dict[int, int] = {}
        self.step: serving.Batch | None = None

    def has_room_for(self, request: str) -> bool:
        return request in self.slot_of or bool(self.free)

    def hold(self, request: str) -> int:
        """Returns the request's slot, or takes a free one for it."""
        if request not in self.slot_of:
            self.slot_of[request] = self.take()
        return self.slot_of[request]

    def hold_copy(self, request: str, name: int) -> None:
        """Returns a slot for the request, with the states of this name."""
        source = self.slot_with[name]
        self.free.remove(source)
        self.free.insert(0, source)
        if (slot := self.hold(request)) != source:
            self.copy([source], [slot])

    def take(self) -> int:
        """Returns a free slot, whatever it holds."""
        slot = self.free.pop()
        if (name := self.name_of.pop(slot, None)) is not None:
            del self.slot_with[name]
        return slot

    def keep(self, slot: int, name: int) -> None:
        """Frees the slot. It is the last to be taken again, because its states have a name."""
        self.slot_with[name], self.name_of[slot] = slot, name
        self.free.insert(0, slot)

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            self.free.append(slot)

    def forget_names(self) -> None:
        self.slot_with.clear()
        self.name_of.clear()

    def release(self, request: str) -> None:
        self.give_back(self.slot_of.pop(request, None))

    def release_all(self) -> None:
        for request in list(self.slot_of):
            self.release(request)

    def begin_step(self, sequences: Iterable[Part], checkpoints: Mapping[str, Checkpoint] | None = None) -> None:
        """Sets the step that the layers compute next."""
        batch = list(sequences)
        decodes = 0
        while decodes < len(batch) and batch[decodes].tokens == 1 and batch[decodes].past:
            decodes += 1
        cu_seqlens = [0, *itertools.accumulate(sequence.tokens for sequence in batch)]
        lists = [
            [self.slot_of[sequence.request] for sequence in batch],
            [int(sequence.past > 0) for sequence in batch],
            cu_seqlens,
            [boundary - decodes for boundary in cu_seqlens[decodes:]],
        ]
        if checkpoints:
            none = Checkpoint(0, -1)
            result = [checkpoints.get(sequence.request, none) for sequence in batch]
            lists += [[x.tokens for x in result], [x.slot for x in result]]
        numbers = torch.tensor(list(itertools.chain(*lists))).to(self.device, non_blocking=True)
        state_indices, has_past, boundaries, prefill_boundaries, *checkpoints = numbers.split([len(x) for x in lists])
        self.step = serving.Batch(
            state_indices, len(batch), decodes, -1, has_past.bool(), boundaries, prefill_boundaries, *checkpoints
        )

    def current(self) -> serving.Batch:
        if self.step is None:
            raise RuntimeError(
                "StatePool: expected begin_step() before a layer runs, to say which requests its tokens belong to"
            )
        return self.step

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole slots in one dispatch. No slot may be both written and read."""
        if not sources:
            return
        offsets = torch.tensor([sources, destinations]) * self.slot_bytes
        sizes = torch.full((len(sources),), self.slot_bytes)
        torch_gdn.batch_copy_(self.storage, offsets[0], offsets[1], sizes)


def slot_view(pool: StatePool, first_byte: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns a view [slots, *shape]."""
    end = first_byte + math.prod(shape) * dtype.itemsize
    return pool.storage.view(pool.slots, pool.slot_bytes)[:, first_byte:end].view(dtype).unflatten(1, shape)
