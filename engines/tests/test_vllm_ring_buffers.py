"""The tail and sinks of vLLM's requests: what a step finds in a request's slot is what was last accepted there.

Also the means of keys, which have the same owner. vLLM itself is not needed: `FakeAttention` stands for its layers.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from torch_gdn.aura import Scheme
from torch_gdn_engines.vllm.ring_buffers import (
    KeepsExactRows,
    Layout,
    Scheduled,
    Slots,
    allocate,
    layout_of,
    share_of_means,
)

LAYOUT, BATCH = Layout(sinks=4, tail=20, drafts=3, slots=4), 5


@dataclass
class Request:
    name: str
    block: int
    accepted: list[float] = field(default_factory=list)  # what was written for each token; NaN in a cached prefix

    @property
    def first(self) -> int:
        return len(self.accepted)


def schedule(
    chance: random.Random, requests: list[Request], first_tokens: dict[int, list[float]], names: Any
) -> list[tuple[Request, int]]:
    """Draws the next step: requests in any order, some with a prompt's part, some with drafts.

    `first_tokens` has the first tokens of blocks that a new request may find.
    """
    while not requests or (len(requests) < 6 and chance.random() < 0.5):
        name, block = f"{next(names)}", chance.randint(1, 9)
        prefix = [*first_tokens.get(block, []), *[float("nan")] * 28]
        if len(prefix) == 28 + LAYOUT.sinks and chance.random() < 0.6:
            requests.append(Request(name, block, prefix))
        elif all(block != request.block for request in requests):
            first_tokens.pop(block, None)
            requests.append(Request(name, block))
    batch = chance.sample(requests, min(len(requests), chance.randint(1, BATCH)))
    return [(request, chance.choice([1, 1, 1, 2, 4, 9, 60])) for request in batch]


def rows_in_slots(layout: Layout, slot: int, start: int, sink_slot: int, pool: Tensor, first: int) -> dict[int, float]:
    """What attention reads, by position: rows as the docstring of `aura_paged_attention` says."""
    sinks = range(min(first, layout.sinks) if sink_slot >= 0 else 0)
    tail = range(max(start, first - layout.tail, layout.sinks), first if slot >= 0 else 0)
    places = [(p, sink_slot, p) for p in sinks] + [(p, slot, layout.sinks + p % layout.ring) for p in tail]
    return {p: float(pool[owner, row, 0, 0]) for p, owner, row in places}


@pytest.mark.parametrize("drafts", [3, 0])
def test_a_slot_holds_what_was_accepted_last(device: torch.device, drafts: int) -> None:
    """Without drafts, the host computes the rows of a batch, and the device those of a padded one."""
    layout, chance, names, written = replace(LAYOUT, drafts=drafts), random.Random(drafts), iter(range(1000)), 0.0
    slots, requests, first_tokens = Slots(layout, BATCH, device), list[Request](), dict[int, list[float]]()
    pool = torch.full((layout.slots, layout.rows, 1, 16), torch.nan, device=device)
    read = [0, 0]
    for _ in range(100):
        batch = schedule(chance, requests, first_tokens, names)
        slots.begin_step([Scheduled(each.name, each.first, count, each.block) for each, count in batch])
        places = slots.numbers[: 3 * len(batch)].view(3, -1).t().tolist()
        for place, (request, _) in zip(places, batch, strict=True):
            rows = rows_in_slots(layout, *place, pool.cpu(), request.first)
            assert rows == {p: request.accepted[p] for p in rows}
            read[0] += sum(p < LAYOUT.sinks for p in rows)
            read[1] += sum(p >= LAYOUT.sinks for p in rows)
        counts = torch.tensor([0, *(count for _, count in batch)], dtype=torch.int32)
        lengths = torch.tensor([request.first + count for request, count in batch], dtype=torch.int32)
        tokens = int(counts.sum())
        sequences = counts.cumsum(0, dtype=torch.int32).to(device), lengths.to(device)
        step = slots.step(*sequences, tokens + 2)
        assert slots.step(*sequences, tokens).new_rows.tolist() == step.new_rows[:tokens].tolist()
        rows_of_tokens = step.new_rows[:tokens][step.new_rows[:tokens] >= 0].tolist()
        assert len({*rows_of_tokens}) == len(rows_of_tokens)  # threads write in any order
        assert step.new_rows[tokens:].tolist() == [-1, -1]
        new = (written + torch.arange(tokens + 2.0)).view(-1, 1, 1).expand(-1, 1, 16).contiguous().to(device)
        torch_gdn.reshape_and_cache(new, new, pool, pool.clone(), step.new_rows)
        for request, count in batch:
            rejected = chance.randint(0, count - 1) if count <= 1 + drafts else 0
            request.accepted += [written + i for i in range(count - rejected)]
            written += count
            first_tokens.setdefault(request.block, request.accepted[: LAYOUT.sinks])
            if len(first_tokens[request.block]) < LAYOUT.sinks:
                first_tokens[request.block] = request.accepted[: LAYOUT.sinks]
        for request in [x for x in requests if chance.random() < 0.05]:
            requests.remove(request)
            slots.release([request.name])
        for request in [x for x in requests if chance.random() < 0.1]:  # preempted, and resumed from a cached prefix
            first = chance.choice([0, request.first // 2, request.first + 10])
            if first == 0:
                request.accepted, request.block = [], 100 + next(names)
            elif min(first, request.first) >= LAYOUT.sinks:
                request.accepted = (request.accepted + [float("nan")] * 10)[:first]
    assert read[0] > 100
    assert read[1] > 500


def test_a_request_from_the_start_has_its_sinks() -> None:
    slots = Slots(replace(LAYOUT, slots=2), BATCH, torch.device("cpu"))

    def begin(*batch: tuple[str, int, int, int]) -> list[list[int]]:
        """Returns slot, start and slot of sinks of each request."""
        slots.begin_step([Scheduled(*each) for each in batch])
        return slots.numbers[: 3 * len(batch)].view(3, -1).t().tolist()

    (ring, start, sinks), other = begin(("new", 0, 100, 7), ("of a prefix", 32, 5, 8))
    assert (start, other[1:]) == (0, [32, -1])
    assert begin(("of a prefix", 37, 1, 8), ("new", 100, 4, 7)) == [other, [ring, 0, sinks]]
    assert begin(("new", 101, 1, 7)) == [[ring, 0, sinks]]  # three drafts were rejected
    assert begin(("new", 97, 1, 7)) == [[ring, 97, sinks]]  # more than a step's drafts: the ring has newer tokens
    assert begin(("third", 32, 1, 7)) == [[other[0], 32, sinks]]  # takes the ring of the request that waits longest
    result = begin(("fourth", 0, 1, 6), ("third", 33, 1, 7), ("new", 98, 1, 7))
    assert result == [[-1, 0, 1 - sinks], [other[0], 32, sinks], [ring, 97, sinks]]
    slots.release(["third"])
    assert begin(("of a prefix", 38, 1, 8)) == [[other[0], 38, -1]]  # others wrote into this ring meanwhile
    result = begin(("fifth", 0, 1, 5), ("new", 99, 1, 7))  # takes what the batch does not use
    assert result == [[other[0], 0, 1 - sinks], [ring, 97, sinks]]


@pytest.mark.parametrize("value", [-1, 4097, 1.0, "128", True])
def test_a_wrong_number_of_tokens_is_an_error(value: Any) -> None:
    scheduler = SimpleNamespace(max_num_seqs=4)
    config = SimpleNamespace(
        additional_config={"aura_tail": value}, speculative_config=None, scheduler_config=scheduler
    )
    with pytest.raises(ValueError, match=r"aura_tail: expected a number from 0 to 4096, got "):
        layout_of(config)


class FakeAttention:
    """A layer with codes, as far as its pools are concerned."""

    scheme = Scheme("4v4t")
    num_kv_heads = 2
    exact: Any = None
    tile_means: Tensor | None = None

    def __init__(self, head_size: int = 64, reads: str | None = None) -> None:
        self.head_size, self.kv_sharing_target_layer_name = head_size, reads

    def parts(self, kv_cache: Tensor) -> tuple[Tensor]:
        return (kv_cache,)


Pools = Callable[..., Any]


@pytest.fixture
def make_pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Returns a function that allocates what vLLM's pools of 6 blocks need, and returns the engine's configuration."""
    name = "torch_gdn_engines.vllm.aura_attention"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(AuraPagedAttention=FakeAttention))

    def make(
        layers: dict[str, FakeAttention], block_size: int, device: torch.device | str = "cpu", **options: Any
    ) -> Any:
        def layer(of: FakeAttention) -> Any:
            cell = of.scheme.bytes_per_token(of.head_size)
            cache = torch.zeros(6, block_size, of.num_kv_heads, cell, dtype=torch.uint8, device=device)
            return SimpleNamespace(impl=of, kv_cache=cache)

        config = SimpleNamespace(
            additional_config={"aura": "4v4t", **options},
            speculative_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=SimpleNamespace(dtype=torch.float32),
            compilation_config=SimpleNamespace(
                static_forward_context={name: layer(of) for name, of in layers.items()} | {"linear": object()}
            ),
        )
        allocate(config, torch.device(device))
        return config

    return make


def test_a_copied_block_keeps_its_means(device: torch.device, make_pools: Pools) -> None:
    """vLLM reads all sources before it writes. A layer that reads another layer's codes has the same means."""
    layers = {"0": FakeAttention(), "1": FakeAttention(128), "2": FakeAttention(reads="0")}
    config = make_pools(layers, 256, device)
    assert layers["2"].tile_means is layers["0"].tile_means
    means = [of.tile_means for of in layers.values() if of.tile_means is not None]
    assert [tuple(x.shape) for x in means] == [(6, 2, 2, 64), (6, 2, 2, 128), (6, 2, 2, 64)]
    for x in means:
        x.copy_(torch.randn(x.shape))
    expected = [x[[0, 2, 2, 3, 1, 5]].clone() for x in means]

    class VllmRunner:
        def _update_states(self, scheduler_output: Any) -> str:
            return "updated"

    class Runner(KeepsExactRows, VllmRunner):
        vllm_config = config
        exact_slots = Slots(Layout(4, 128), 4, device)
        input_batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=torch.tensor([0]))

    step = {"finished_req_ids": [], "num_scheduled_tokens": {"a": 1}}
    assert Runner()._update_states(SimpleNamespace(**step, kv_cache_block_copies=[(2, 1), (1, 4)])) == "updated"
    Runner()._update_states(SimpleNamespace(**step, kv_cache_block_copies=None))
    for x, other in zip(means, expected, strict=True):
        assert x.equal(other)


@pytest.mark.parametrize("head_sizes", [(64, 64), (64, 256), (256, 64)])
def test_the_share_of_means(head_sizes: tuple[int, int], make_pools: Pools) -> None:
    """It is that of the layer that has most for its size, whatever layers vLLM's blocks hold."""
    layers = {str(i): FakeAttention(D) for i, D in enumerate(head_sizes)}
    config = make_pools(layers, 256)
    shares = []
    for each in (config.compilation_config.static_forward_context[name] for name in layers):
        shares.append(each.impl.tile_means.nbytes / each.kv_cache.nbytes)
    assert share_of_means(config) == max(shares) > 0.01


@pytest.mark.parametrize("options", [{"aura_tail": 127}, {"layers": {}}], ids=["short tail", "no layer"])
def test_without_means_they_have_no_share(options: dict[str, Any], make_pools: Pools) -> None:
    config = make_pools(**{"layers": {"0": FakeAttention()}, "block_size": 128, **options})
    assert share_of_means(config) == 0


@pytest.mark.parametrize(
    "block_size, tail, has_means, is_said",
    [(128, 128, True, False), (384, 200, True, False), (192, 128, False, True), (192, 127, False, False)],
)
def test_blocks_that_are_not_whole_tiles_cause_a_warning(
    block_size: int, tail: int, has_means: bool, is_said: bool, make_pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    layers = {"0": FakeAttention(), "1": FakeAttention(), "2": FakeAttention(reads="0")}
    with caplog.at_level(logging.WARNING, "torch_gdn"):
        make_pools(layers, block_size, aura_tail=tail)
    assert [of.tile_means is not None for of in layers.values()] == [has_means] * 3
    warning = f"aura: keys have no means in blocks of {block_size} tokens: a multiple of 128 has them"
    assert [record.getMessage() for record in caplog.records] == [warning] * is_said
