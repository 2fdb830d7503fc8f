"""Tests both sides of a permission: what no kernel reads may be invalid, and its neighbour that is read may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.errors import assert_same_bits
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import OpEntry

PAGED = [op for op, entry in REGISTRY.items() if {"block_table", "window"} <= set(entry.arguments)]
STATED = [op for op, entry in REGISTRY.items() if "has_initial_state" in entry.arguments]
WRONG = (-1, 10_000, LARGE)
BLOCK = 8


def refuses(entry: OpEntry[Any], point: Any, call: Call, device: torch.device, argument: str) -> None:
    on_device = to_device(call, device)
    match = f"^{entry.name}: {argument}: expected "
    if device.type == "cpu":
        with pytest.raises(ValueError, match=match):
            entry.run(on_device, point)
        return
    entry.run(on_device, point)
    with pytest.raises(RuntimeError, match=match):
        torch.mps.synchronize()


def outputs(entry: OpEntry[Any], point: Any, call: Call, device: torch.device) -> dict[str, Tensor]:
    on_device = to_device(call, device)
    result = entry.outputs(on_device, entry.run(on_device, point))
    if device.type == "mps":
        torch.mps.synchronize()
    return {name: x.cpu() for name, x in result.items()}


def read_columns(queries: int, keys: int, window: int) -> range:
    """Returns the blocks of a sequence's keys that any of its queries sees."""
    first = max(0, keys - queries - window + 1) if window else 0
    return range(first // BLOCK, -(-keys // BLOCK)) if queries else range(0)


@pytest.mark.parametrize("window", [0, 1, 9, 16, 17])
@pytest.mark.parametrize("op", PAGED)
def test_blocks(device: torch.device, op: str, window: int) -> None:
    """A block number that no query reads may be anything. The first and last one that a query reads must be valid."""
    entry = REGISTRY[op]
    queries, keys = (1, 0, 3, 20), (33, 4, 40, 41)
    other = {"means": False} if "key_tile_means" in entry.arguments else {}  # means need blocks of 128 tokens
    point = replace(entry.small, plain=False, queries=queries, keys=keys, block_size=BLOCK, **other)
    call = entry.call(point) | {"window": window}
    expected = outputs(entry, point, call, device)
    seen = [read_columns(q, k, window) for q, k in zip(queries, keys, strict=True)]
    table = call["block_table"].long()
    for row, columns in zip(table, seen, strict=True):
        others = [column for column in range(len(row)) if column not in columns]
        row[others] = torch.tensor(WRONG)[torch.arange(len(others)) % len(WRONG)]
    for name, x in outputs(entry, point, call | {"block_table": table}, device).items():
        assert_same_bits(name, x, expected[name])
    for n, columns in enumerate(seen):
        for column in {*columns[:1], *columns[-1:]}:
            wrong = call["block_table"].clone()
            wrong[n, column] = WRONG[(n + column) % 2]
            refuses(entry, point, call | {"block_table": wrong}, device, "block_table")


@pytest.mark.parametrize("tokens", [3, 20])  # a convolution has one kernel for few tokens, and one for many
@pytest.mark.parametrize("op", STATED)
def test_states(device: torch.device, op: str, tokens: int) -> None:
    """A sequence's state may be NaN if the sequence starts anew, and so may an unused slot. If a sequence continues
    from a state of NaN, its own output is NaN, and no other.
    """
    entry = REGISTRY[op]
    point = replace(entry.small, batch=4, tokens=tokens)
    call = entry.call(point)
    pools = [name for name in call if name.endswith("_pool")]
    count = len(call["state_pool"])
    indices = torch.tensor([count - 1, 0, 2, 1])
    call |= {"state_indices": indices, "has_initial_state": torch.tensor([False, True, False, True])}
    unread = [count - 1, 2, *set(range(count)) - set(indices.tolist())]
    expected = outputs(entry, point, call, device)
    spoilt = call | {name: call[name].index_fill(0, torch.tensor(unread), torch.nan) for name in pools}
    result = outputs(entry, point, spoilt, device)
    kept = [slot for slot in range(count) if slot in indices.tolist()]
    for name, x in result.items():
        same = (x[kept], expected[name][kept]) if name in pools else (x, expected[name])
        assert_same_bits(name, *same)
    read = call | {name: call[name].index_fill(0, torch.tensor([1]), torch.nan) for name in pools}
    result = outputs(entry, point, read, device)
    for name, x in result.items():
        others = [0, 2, count - 1] if name in pools else [0, 1, 2]
        assert name in pools or x[3].isnan().any()
        assert_same_bits(name, x[others], expected[name][others])
