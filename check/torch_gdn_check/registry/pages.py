"""Entries of the ops that find the slots of new tokens, or write keys and values to pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_gdn_check.registry.attention import (
    DTYPES_OF_PAGES,
    OUTSIDE,
    SIZES,
    PagePoint,
    make_call,
    wrong_pages,
)
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call
from torch_gdn_check.registry.invalid import change, put
from torch_gdn_check.registry.layers import HEADS, HeadPoint, draw_heads, wrong_heads
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.registry import Hostile, Invalid, OpEntry, Point, register


def draw_pages(point: PagePoint) -> Call:
    """Draws five tokens, one of them without a slot."""
    key, value = torch.randn(2, 5, point.HK, point.D).to(point.dtype)
    size = point.block_size
    row = (4, size, point.HK, point.D + point.gap)
    caches = [torch.zeros(row, dtype=point.cache)[..., : point.D] for _ in range(2)]
    slots = torch.tensor([2 * size, 4 * size - 1, -1, size, 0])
    return {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots}


@dataclass(frozen=True)
class StoredHeadPoint(HeadPoint):
    """Heads of q, k and v in pages of 8 tokens. The third token has a negative slot, and the last one has none."""

    keys: int = 2
    cache: torch.dtype = F32


def draw_stored_heads(point: StoredHeadPoint) -> Call:
    call = draw_heads(point)
    del call["heads_first"]
    tokens = point.batch * point.tokens
    blocks = tokens // 8 + 3
    slots = torch.randperm(8 * blocks)[: tokens - 1]
    slots[2:3] = -1
    row = (blocks, 8, point.keys, point.D)
    caches = {name: point.placed(torch.zeros(row, dtype=point.cache)) for name in ("key_cache", "value_cache")}
    return call | {"v": replace(point, heads=point.keys).rows(), "slot_mapping": slots} | caches


def draw_slots(point: Point) -> Call:
    """Draws a prefill, an empty sequence and a decode, in the dtypes that vLLM passes, with two entries of padding."""
    queries, keys, size = (9, 0, 1), (20, 4, 33), 8
    call = make_call(queries, keys, block_size=size, HK=1, D=1)
    positions = [range(k - q, k) for q, k in zip(queries, keys, strict=True)]
    result = {name: call[name] for name in ("cu_seqlens", "block_table")}
    slots = torch.full((sum(queries) + 2,), 7)
    return (
        {"positions": torch.tensor([*itertools.chain(*positions)])}
        | result
        | {
            "block_size": size,
            "slot_mapping": slots,
        }
    )


def wrong_writes(entry: OpEntry[Any]) -> Iterator[Invalid]:
    yield from wrong_pages(entry)
    yield Invalid("slot_mapping", ValueError, "9 for at most 6", put("slot_mapping", torch.arange(9)))


def wrong_stored_heads(entry: OpEntry[StoredHeadPoint]) -> Iterator[Invalid]:
    yield from [*wrong_heads(entry), *wrong_writes(entry)]


def wrong_slots(entry: OpEntry[Point]) -> Iterator[Invalid]:
    yield Invalid("slot_mapping", ValueError, "too few", change("slot_mapping", lambda x: x[3:]))
    for size in (0, -1, 2**31):
        yield Invalid("block_size", ValueError, f"{size}", put("block_size", size))
    four_blocks = change("block_table", lambda x: x[:, :1].repeat(1, 4))
    yield Invalid("block_table", ValueError, "2^31 tokens", lambda call: four_blocks(call) | {"block_size": 2**29})


def compiled_pages() -> Iterator[PagePoint]:
    for dtype, cache, D in itertools.product(DTYPES, DTYPES, SIZES):
        yield from (PagePoint(dtype, cache=cache, D=D, HK=1, gap=gap) for gap in (1, 0))


def compiled_stores() -> Iterator[StoredHeadPoint]:
    for dtype, cache, aligned in itertools.product(DTYPES, DTYPES, (True, False)):
        yield StoredHeadPoint(dtype, cache=cache, aligned=aligned)


register(
    OpEntry(
        "reshape_and_cache_",
        draw=draw_pages,
        small=PagePoint(D=32),
        points=[PagePoint(dtype, cache=cache, D=D, block_size=size) for dtype, cache, D, size in DTYPES_OF_PAGES],
        compiled=compiled_pages,
        bound=lambda point, call, exact: {"key_cache": 0.0, "value_cache": 0.0},  # but for rounding
        takes={"slot_mapping": "0"},
        invalid=wrong_writes,
        hostile=[Hostile("slot_mapping", [3, 32, LARGE, 8, 0])],  # of 32
    ),
    OpEntry(
        "qk_norm_rope_and_cache_",
        draw=draw_stored_heads,
        small=StoredHeadPoint(D=32, tokens=3, heads=4),
        points=[StoredHeadPoint(dtype, D=D, P=P, heads=4, cache=dtype) for dtype, D, P in HEADS]
        + [StoredHeadPoint(BF16, D=128, other=F32, normed=False), StoredHeadPoint(F16, cache=BF16, aligned=False)],
        compiled=compiled_stores,
        operations=lambda call: 6 * (call["q"].numel() + call["k"].numel()),
        takes={"q": "2", "slot_mapping": "0"},
        invalid=wrong_stored_heads,
        hostile=[Hostile("slot_mapping", [3, 24, LARGE, 8, 0])],  # of 24
    ),
    OpEntry(
        "compute_slot_mapping_",
        draw=draw_slots,
        small=Point(),
        points=[Point()],
        takes={"positions": "0", "block_table": "1", "slot_mapping": "0-"},
        invalid=wrong_slots,
        hostile=[Hostile("positions", [3, 40, LARGE, -1, *range(6)]), OUTSIDE[0], OUTSIDE[2]],
    ),
)
