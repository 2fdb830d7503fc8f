"""The tail and sinks of vLLM's requests: what a step finds in a request's slot is what was last accepted there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from torch_gdn.integrations.vllm.exact_rows import Layout, Slots, layout_of

LAYOUT, BATCH = Layout(sinks=4, tail=20, drafts=3, slots=4), 5


@dataclass
class Request:
    name: str
    first: int  # tokens before the next step
    accepted: list[float] = field(default_factory=list)  # what was written for each token; NaN in a cached prefix


def schedule(chance: random.Random, requests: list[Request], names: Any) -> list[tuple[Request, int]]:
    """Draws the next step: requests in any order, some with a prompt's part, some with drafts."""
    while not requests or (len(requests) < 6 and chance.random() < 0.5):
        prefix = chance.choice([0, 0, 32])
        requests.append(Request(f"{next(names)}", prefix, [float("nan")] * prefix))
    batch = chance.sample(requests, min(len(requests), chance.randint(1, BATCH)))
    return [(request, chance.choice([1, 1, 1, 2, 4, 9, 60])) for request in batch]


def found(slot: int, start: int, pool: Tensor, first: int) -> dict[int, float]:
    """What attention reads, by position: rows as the docstring of `aura_paged_attention` says."""
    kept = [
        p for p in range(first if slot >= 0 else 0) if p >= start and (p < LAYOUT.sinks or p >= first - LAYOUT.tail)
    ]
    rows = [p if p < LAYOUT.sinks else LAYOUT.sinks + p % LAYOUT.ring for p in kept]
    return {p: float(pool[slot, row, 0, 0]) for p, row in zip(kept, rows, strict=True)}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_slot_holds_what_was_accepted_last(device: torch.device, seed: int) -> None:
    chance, names, written = random.Random(seed), iter(range(1000)), 0.0
    slots, requests = Slots(LAYOUT, BATCH, device), list[Request]()
    pool = torch.full((LAYOUT.slots, LAYOUT.rows, 1, 16), torch.nan, device=device)
    read = 0
    for _ in range(60):
        batch = schedule(chance, requests, names)
        slots.begin_step([(request.name, request.first, count) for request, count in batch])
        places = slots.numbers[: 2 * len(batch)].view(2, -1).t().tolist()
        for (slot, start), (request, _) in zip(places, batch, strict=True):
            rows = found(slot, start, pool.cpu(), request.first)
            assert rows == {p: request.accepted[p] for p in rows}
            read += len(rows)
        counts = torch.tensor([0, *(count for _, count in batch)], dtype=torch.int32)
        lengths = torch.tensor([request.first + count for request, count in batch], dtype=torch.int32)
        tokens = int(counts.sum())
        step = slots.step(counts.cumsum(0, dtype=torch.int32).to(device), lengths.to(device), tokens + 2)
        rows_of_tokens = step.new_rows[:tokens][step.new_rows[:tokens] >= 0].tolist()
        assert len({*rows_of_tokens}) == len(rows_of_tokens)  # threads write in any order
        assert step.new_rows[tokens:].tolist() == [-1, -1]
        new = (written + torch.arange(tokens + 2.0)).view(-1, 1, 1).expand(-1, 1, 16).contiguous().to(device)
        torch_gdn.reshape_and_cache(new, new, pool, pool.clone(), step.new_rows)
        for request, count in batch:
            rejected = chance.randint(0, count - 1) if count <= 1 + LAYOUT.drafts else 0
            request.accepted += [written + i for i in range(count - rejected)]
            request.first += count - rejected
            written += count
        for request in [x for x in requests if chance.random() < 0.05]:
            requests.remove(request)
            slots.release([request.name])
        for request in [x for x in requests if chance.random() < 0.1]:  # preempted, and resumed from a cached prefix
            first = chance.choice([0, request.first // 2, request.first + 10])
            request.first, request.accepted = first, (request.accepted + [float("nan")] * 10)[:first]
    assert read > 500


def test_a_request_from_the_start_has_its_sinks() -> None:
    slots = Slots(replace(LAYOUT, slots=2), BATCH, torch.device("cpu"))
    slots.begin_step([("new", 0, 100), ("of a prefix", 32, 5)])
    slots.begin_step([("of a prefix", 37, 1), ("new", 100, 4)])
    slots.begin_step([("new", 101, 1)])  # three drafts were rejected
    assert slots.numbers.tolist()[:2] == [slots.held["new"].slot, 0]
    assert slots.held["of a prefix"].start == 32
    slots.begin_step([("new", 97, 1)])  # more than a step's drafts: the ring has newer tokens
    assert slots.held["new"].start == 97
    slots.begin_step([("third", 0, 1)])  # takes the slot of the request that waits longest
    assert list(slots.held) == ["new", "third"]
    slots.begin_step([("fourth", 0, 1), ("third", 1, 1), ("new", 98, 1)])
    assert slots.numbers.tolist()[:3] == [-1, slots.held["third"].slot, slots.held["new"].slot]


@pytest.mark.parametrize("value", [-1, 4097, 1.0, "128", True])
def test_a_wrong_number_of_tokens_is_an_error(value: Any) -> None:
    scheduler = SimpleNamespace(max_num_seqs=4)
    config = SimpleNamespace(
        additional_config={"aura_tail": value}, speculative_config=None, scheduler_config=scheduler
    )
    with pytest.raises(ValueError, match=r"aura_tail: expected a number from 0 to 4096, got "):
        layout_of(config)
