"""Entries of attention to pages of keys and values, plain and coded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.reference.aura import TILE
from torch_gdn_check.registry import invalid
from torch_gdn_check.registry.aura import CODES, Codec
from torch_gdn_check.registry.gdn import LARGE
from torch_gdn_check.registry.inputs import Call, columns_apart
from torch_gdn_check.registry.invalid import change, options, put
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32
from torch_gdn_check.registry.registry import Change, Hostile, Invalid, Named, OpEntry, Point, register

SIZES = (64, 80, 96, 128, 256)
FORMS = (8, 16, 64)  # queries x query heads per KV head; each number takes another kernel of paged attention


@dataclass(frozen=True)
class PagePoint(Point):
    cache: torch.dtype = F32
    bits: tuple[int, int] = (3, 4)  # per key and value of coded pages
    trellis: bool = False
    D: int = 64
    HQ: int = 4
    HK: int = 2
    block_size: int = 8
    queries: tuple[int, ...] = (9, 0, 1)
    keys: tuple[int, ...] = (20, 4, 33)
    longest: int = 0  # max_seq_len passed by the host; 0 passes the true maximum
    plain: bool = False  # contiguous pages without padding that must not be read; with a window and sinks
    gap: int = 0  # elements between rows of the pages to write
    tail: int = 0  # tokens before the queries that have exact rows; with some, two sinks have them too
    means: bool = False  # of the keys of tiles; blocks are then whole tiles


def pool(blocks: int, block_size: int, heads: int, D: int, dtype: torch.dtype, layout: str = "pages") -> list[Tensor]:
    """Makes keys and values [blocks, block_size, heads, D] of NaN.

    `pages` is one buffer of pages [heads, block_size, 2 D], vLLM's layout. `padded` has three more elements between
    the pages, so that no vector is aligned. `apart` makes two tensors.
    """
    if layout == "apart":
        return [torch.full((blocks, block_size, heads, D), torch.nan, dtype=dtype) for _ in range(2)]
    size = heads * block_size * 2 * D
    gap = 3 if layout == "padded" else 0
    whole = torch.full((blocks * (size + gap),), torch.nan, dtype=dtype)
    pages = whole.as_strided((blocks, block_size, heads, 2 * D), (size + gap, 2 * D, block_size * 2 * D, 1))
    return list(pages.chunk(2, dim=-1))


def make_call(
    queries: Sequence[int],
    keys: Sequence[int],
    HQ: int = 4,
    HK: int = 2,
    D: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "pages",
    padding: int = 3,
    shared_blocks: int = 0,
) -> Call:
    """Makes arguments of torch_gdn.paged_attention: sequences with shuffled blocks in a pool of NaN.

    All sequences share their first `shared_blocks` blocks. Elements that must not be read are NaN, or in blocks
    outside the pool.
    """
    needed = [-(-length // block_size) for length in keys]
    order = torch.randperm(sum(needed) + 2).tolist()
    table = torch.full((len(keys), max(needed, default=0) + 1), 2**31 - 1, dtype=torch.int32)
    caches = pool(len(order), block_size, HK, D, cache_dtype or dtype, layout)
    for n, length in enumerate(keys):
        for i in range(needed[n]):
            known = n > 0 and i < shared_blocks
            table[n, i] = table[0, i] if known else order.pop()
            filled = min(block_size, length - i * block_size)
            for cache in caches:
                if not known:
                    cache[table[n, i], :filled] = torch.randn(filled, HK, D).to(cache.dtype)
    boundaries = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    T = sum(queries) + padding
    q = 1.5 * torch.randn(T, HQ + 2 * HK, D)[:, :HQ]  # views of one projection
    q[sum(queries) :] = torch.nan
    out = torch.full((T, HQ + 1, D), 7.0, dtype=dtype)[:, :HQ]
    return {
        "q": q.to(dtype),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table,
        "cu_seqlens": boundaries,
        "seq_lens": torch.tensor(list(keys), dtype=torch.int32),
        "max_query_len": max(queries, default=0),
        "max_seq_len": max(keys, default=0),
        "out": out,
    }


def aura_pages(codec: Codec, cache: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns codes and norms of a cache [blocks, block_size, H, D], in pages [H, block_size, words] with gaps.

    Also returns the vectors that they represent, in float64. NaN in the cache give NaN norms.
    """
    blocks, size, H, _ = cache.shape
    codes, norms = reference.aura_encode(cache.double().nan_to_num(0.0), *codec.tables)
    norms = norms.half()
    decoded = reference.aura_decode(codes, norms, codec.codebook, codec.signs, dtype=torch.float64)
    norms = norms.masked_fill(cache.isnan().any(-1), torch.nan)
    row = codec.words + 1
    whole = torch.full((blocks, H * size * row + 3), 0x5A5A5A5A, dtype=torch.int32)
    pages = whole[:, : H * size * row].view(blocks, H, size, row).transpose(1, 2)
    pages[..., :-1] = codes
    halves = pages[..., -1:].view(torch.float16)
    halves[..., 0] = norms
    return [pages[..., :-1], halves[..., 0]], decoded


def means_of_pages(cache: Tensor) -> Tensor:
    """Draws means of a cache [blocks, block_size, H, D] of whole tiles. Those of tiles without a key are NaN."""
    tiles = cache.unflatten(1, (-1, TILE))
    means = torch.randn(*tiles.shape[:2], *tiles.shape[3:]).half()
    return means.masked_fill(tiles.isnan().all(2), torch.nan)


def slot_means(means: Tensor) -> Tensor:
    """Returns what each slot has of means [blocks, tiles of a block, ..], in float64."""
    return means.double().repeat_interleave(TILE, 1)


def draw_attention(point: PagePoint) -> Call:
    size = -(-point.block_size // TILE) * TILE if point.means else point.block_size
    call = make_call(point.queries, point.keys, point.HQ, point.HK, point.D, size, point.dtype, point.cache, padding=1)
    if point.longest:
        columns = -(-point.longest // size) - call["block_table"].shape[1]
        call["block_table"] = torch.nn.functional.pad(call["block_table"], (0, columns))
        call["max_seq_len"] = point.longest
    if point.plain:
        call["block_table"] = call["block_table"].clamp(max=0)
        for name in ("q", "out", "key_cache", "value_cache"):
            call[name] = without_nan(call[name])
        call |= {"window": 30, "sinks": torch.randn(point.HQ)}
    return call


def add_exact_rows(call: Call, tail: int, sinks: int, starts: Sequence[int], slack: int = 3) -> Call:
    """Adds exact rows of random numbers. Rows that must not be read are NaN. One of three sequences has no slot."""
    N, (T, _, D), HK = len(starts), call["q"].shape, call["key_codes" if "key_codes" in call else "key_cache"].shape[2]
    dtype, slots = call["q"].dtype, [-1 if n == 1 and N > 2 else N - n for n in range(N)]
    pools = [torch.full((N + 1, sinks + tail + slack, HK, D + 1), torch.nan, dtype=dtype)[..., :D] for _ in range(2)]
    made = call | {
        "exact_keys": pools[0],
        "exact_values": pools[1],
        "exact_slots": torch.tensor(slots, dtype=torch.int32),
        "exact_starts": torch.tensor(starts),
        "exact_sink_slots": torch.tensor([-1 if n == 1 and N > 2 else n for n in range(N)]),
        "exact_sinks": sinks,
        "tail": tail,
    }
    for name in ("new_keys", "new_values"):
        made[name] = torch.randn(T, HK, D + 8).to(dtype)[..., :D]
        made[name][call["cu_seqlens"][-1] :] = torch.nan
    for cache in pools:
        for _, _, slot, row in exact_tokens(made):
            if row >= 0:
                cache[slot, row] = torch.randn(HK, D).to(dtype)
    return made


def exact_tokens(call: Call) -> Iterator[tuple[int, int, int, int]]:
    """Yields sequence, position, slot and row of each token with exact rows; row -1: one of the new rows."""
    sinks, tail, ring = call["exact_sinks"], call["tail"], call["exact_keys"].shape[1] - call["exact_sinks"]
    for n, queries in enumerate(call["cu_seqlens"].diff().tolist()):
        length = int(call["seq_lens"][n]) if queries else 0
        for p in range(length - queries):
            slot = int(call["exact_sink_slots" if p < sinks else "exact_slots"][n])
            is_recent = p >= call["exact_starts"][n] and p >= length - queries - tail
            if slot >= 0 and (p < sinks or is_recent):
                yield n, p, slot, p if p < sinks else sinks + p % ring
        for p in range(length - queries, length):
            yield n, p, -1, -1


def place_exact_rows(call: Call, caches: dict[str, Tensor]) -> None:
    """Replaces vectors of decoded caches, [blocks, block_size, HK, D] by "key" and "value", by exact rows."""
    for n, p, slot, row in exact_tokens(call):
        block, offset = divmod(p, caches["key"].shape[1])
        for name, cache in caches.items():
            if row < 0:
                exact = call[f"new_{name}s"][call["cu_seqlens"][n + 1] - int(call["seq_lens"][n]) + p]
            else:
                exact = call[f"exact_{name}s"][slot, row]
            cache[call["block_table"][n, block], offset] = exact


def draw_coded(point: PagePoint) -> Call:
    call = draw_attention(point)
    result = {name: x for name, x in call.items() if not name.endswith("_cache")}
    for name, bits, seed in zip(("key", "value"), point.bits, (3, 4), strict=True):
        codec = Codec(point.D, bits, seed, point.trellis)
        cache = call[f"{name}_cache"]
        if point.means and name == "key":
            result["key_tile_means"] = means_of_pages(cache)
            cache = cache - slot_means(result["key_tile_means"])
        codes, norms = aura_pages(codec, cache)[0]
        codes, norms = (codes.contiguous(), norms.contiguous()) if point.plain else (codes, norms)
        result |= {f"{name}_codes": codes, f"{name}_norms": norms}
        result |= {f"{name}_codebook": codec.codebook, f"{name}_signs": codec.signs}
    if point.tail:
        result = add_exact_rows(result, point.tail, 2, [0] * len(point.keys), 0 if point.plain else 3)
    return result if not point.plain else {name: without_nan(x) for name, x in result.items()}


def without_nan(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.randn_like(x), x).contiguous()


EXACT = (
    *("exact_keys", "exact_values", "exact_slots", "exact_starts", "exact_sink_slots", "new_keys", "new_values"),
    *("exact_sinks", "tail"),
)


def exact_coded(call: Call) -> None:
    """Computes attention to the vectors that the codes represent, and to exact rows."""
    plain = {name: x for name, x in call.items() if not name.startswith(("key_", "value_")) and name not in EXACT}
    caches = {}
    for name in ("key", "value"):
        parts = {part: call[f"{name}_{part}"] for part in ("codes", "norms", "codebook", "signs")}
        caches[name] = reference.aura_decode(**parts, dtype=torch.float64)
    if call.get("key_tile_means") is not None:
        caches["key"] += slot_means(call["key_tile_means"])
    if "exact_keys" in call:
        place_exact_rows(call, caches)
    reference.paged_attention(key_cache=caches["key"], value_cache=caches["value"], **plain)


def draw_tile_means(point: PagePoint) -> Call:
    """The third sequence's tail begins late. Means of all tiles are known before."""
    rows = add_exact_rows(
        draw_attention(replace(point, HQ=point.HK, means=True, plain=False)),
        point.tail,
        2,
        [200 * (n == 2) for n in range(len(point.keys))],
    )
    blocks, size = rows["key_cache"].shape[:2]
    means = torch.randn(blocks, size // TILE, point.HK, point.D + 8).half()[..., : point.D]
    result = {"keys": rows["new_keys"], "tile_means": means, "block_table": rows["block_table"].clamp(max=blocks)}
    result |= {name: rows[name] for name in ("cu_seqlens", "seq_lens", *EXACT[:1], *EXACT[2:4], *EXACT[7:])}
    result |= {name: rows[name] for name in ("max_query_len", "max_seq_len")}
    return result if not point.plain else {name: without_nan(x) for name, x in result.items()}


def attention_bounds(point: PagePoint, call: Call, exact: Named) -> dict[str, float]:
    return {"out": 1e-6} if point.dtype == F32 else {}


def wrong_pages(entry: OpEntry[Any]) -> Iterator[Invalid]:
    """Yields the caches that every op with plain pages refuses."""
    yield from invalid.apart("key_cache", "value_cache")


def each_of(*names: str, how: slice | tuple[slice | Tensor, ...]) -> Change:
    return lambda call: call | {name: call[name][how] for name in names}


def wrong_attention(entry: OpEntry[PagePoint]) -> Iterator[Invalid]:
    yield from wrong_pages(entry)
    for size in (8, 40, 272):
        yield Invalid("q", ValueError, f"D of {size}", change("q", partial(invalid.zeros, size=size)))
    every = slice(None)
    yield Invalid("q", ValueError, "3 heads for 2", each_of("q", "out", how=(every, slice(3))))
    yield from invalid.apart("out")
    no_heads = each_of("key_cache", "value_cache", how=(every, every, slice(0)))
    yield Invalid("key_cache", ValueError, "no heads", no_heads)
    no_slots = each_of("key_cache", "value_cache", how=(every, slice(0)))
    yield Invalid("key_cache", ValueError, "blocks of 0", no_slots)
    for name in ("max_query_len", "max_seq_len"):
        yield Invalid(name, ValueError, "2^31", put(name, 2**31))
    yield Invalid("window", ValueError, "not causal", put("causal", False))


def heads_of_48(call: Call) -> Call:
    return call | {name: call[name].new_zeros(11, 4, 48) for name in ("q", "out")}


def wrong_coded(entry: OpEntry[PagePoint]) -> Iterator[Invalid]:
    yield Invalid("q", ValueError, "D of 48", heads_of_48)
    for name in ("key", "value"):
        codes, codebook = (f"{name}_{part}" for part in ("codes", "codebook"))
        yield Invalid(codes, TypeError, "int64", change(codes, torch.Tensor.long))
        yield Invalid(codes, ValueError, "words apart", change(codes, columns_apart))
        yield Invalid(codebook, ValueError, "64 centroids", put(codebook, torch.zeros(64)))
    means = "key_tile_means"
    yield Invalid(means, ValueError, "a tile too many", change(means, lambda x: x.repeat(1, 2, 1, 1)))
    yield from invalid.apart(means)
    parts = ("key_codes", "key_norms", "value_codes", "value_norms")
    more = torch.arange(160) % 128  # of a block of 128
    yield Invalid(means, ValueError, "blocks of 160", each_of(*parts, how=(slice(None), more)))
    yield from wrong_exact_rows()


def wrong_exact_rows() -> Iterator[Invalid]:
    yield Invalid("exact_values", ValueError, "without exact_keys", put("exact_keys", None))
    for name in EXACT[1:7]:
        yield Invalid(name, ValueError, "missing", put(name, None))
    yield from invalid.apart("exact_keys", "exact_values", "new_keys", "new_values")
    for name in ("exact_slots", "exact_sink_slots"):
        yield slot_past_the_last(name)
    no_rows: Call = dict.fromkeys(EXACT[:7])
    for name, other, most in (("exact_sinks", "tail", 10), ("tail", "exact_sinks", 8)):
        yield Invalid(name, ValueError, "more than the rows", put(name, most + 1))
        yield Invalid(name, ValueError, "without rows", options(no_rows | {other: 0}))


def slot_past_the_last(name: str) -> Invalid:
    return Invalid(name, ValueError, "past the last", change(name, lambda x: torch.full_like(x, 9)), by_contents=True)


def wrong_tile_means(entry: OpEntry[PagePoint]) -> Iterator[Invalid]:
    yield from invalid.apart("keys", "tile_means", "exact_keys")
    yield slot_past_the_last("exact_slots")
    for name, most in (("exact_sinks", 133), ("tail", 131)):
        yield Invalid(name, ValueError, "more than the rows", put(name, most + 1))
    for name in ("max_query_len", "max_seq_len"):
        yield Invalid(name, ValueError, "2^31", put(name, 2**31))


SEQUENCES = (((1, 1, 1), (1, 40, 129)), ((1, 0, 35, 2), (70, 5, 35, 50)), ((1,), (1030,)))
DTYPES_OF_PAGES = ((BF16, BF16, 128, 16), (F32, F16, 64, 7), (F16, F32, 96, 48), (BF16, F16, 256, 16))


EXACT_POINTS = [PagePoint(BF16, bits=(4, 4), D=128, queries=SEQUENCES[1][0], keys=SEQUENCES[1][1], tail=24)]
EXACT_POINTS += [PagePoint(F16, bits=(3, 2), D=80, HQ=16, queries=(1, 3), keys=(41, 300), tail=24, means=True)]
TRELLIS_POINTS = [replace(EXACT_POINTS[1], trellis=True), PagePoint(F16, cache=F32, bits=(8, 4), D=128, trellis=True)]


# A prompt of several tiles; the first token of a tile without a slot, with a short tail and with a long one; a short
# prompt; and tokens that begin no tile.
BEGUN = PagePoint(queries=(300, 1, 1, 5, 20, 3), keys=(300, 129, 257, 130, 20, 60))
MEANS_POINTS = [
    replace(BEGUN, dtype=BF16, D=128, tail=128),
    replace(BEGUN, dtype=F16, D=80, HK=3, block_size=256, tail=130),
    PagePoint(F32, D=256, queries=(0, 7, 4), keys=(5, 260, 385), tail=20),
]


def points(coded: bool) -> Iterator[PagePoint]:
    for (dtype, cache, D, size), (queries, keys) in itertools.product(DTYPES_OF_PAGES, SEQUENCES):
        if coded:
            cache = F32
        yield PagePoint(dtype, cache=cache, bits=(8, 4), D=D, block_size=size, queries=queries, keys=keys)
    yield PagePoint(plain=True)
    if coded:
        yield from (*EXACT_POINTS, *TRELLIS_POINTS)


def quick(coded: bool) -> list[PagePoint]:
    cache = F32 if coded else BF16
    kinds = [PagePoint(BF16, cache=cache, bits=(8, 4), D=128, queries=q, keys=k) for q, k in SEQUENCES[1:]]
    return kinds + EXACT_POINTS[:1] if coded else kinds


def compiled(
    codes: Sequence[tuple[tuple[int, int], bool]],
    caches: Sequence[torch.dtype],
    forms: Sequence[int],
    tails: Sequence[int] = (0,),
) -> Iterator[PagePoint]:
    """Yields points in every form, one with a merge of parts."""
    for dtype, cache, code, D, form, tail in itertools.product(DTYPES, caches, codes, SIZES, forms, tails):
        one = PagePoint(dtype, cache=cache, D=D, HQ=form, HK=1, queries=(1,), keys=(3,), longest=16000)
        yield replace(one, bits=code[0], trellis=code[1], tail=tail)


OUTSIDE = (
    Hostile("cu_seqlens", [0, LARGE, 9, 10]),
    Hostile("seq_lens", [LARGE, -4, 33]),
    Hostile("block_table", [[LARGE] * 6, [0] * 6, [-3] * 6]),
)


def operations_of_attention(call: Call) -> int:
    """Counts operations as if every query saw every key of its sequence."""
    lengths = call["cu_seqlens"].diff() * call["seq_lens"]
    return 4 * int(lengths.sum()) * int(call["q"].shape[1] * call["q"].shape[2])


register(
    OpEntry(
        "aura_paged_tile_means_",
        draw=draw_tile_means,
        small=PagePoint(plain=True, queries=(20, 0, 1), keys=(20, 4, 129), tail=128),
        points=MEANS_POINTS,
        compiled=lambda: (PagePoint(dtype, cache=dtype, D=128, tail=8) for dtype in DTYPES),
        takes={"keys": "0", "tile_means": "0", "block_table": "1", "exact_keys": "0 1-"},
        invalid=wrong_tile_means,
        hostile=(
            *OUTSIDE[:2],
            Hostile("block_table", [[LARGE] * 3, [0] * 3, [-3] * 3]),
            Hostile("exact_slots", [LARGE, -LARGE, 4]),
        ),
    ),
    OpEntry(
        "paged_attention_",
        draw=draw_attention,
        small=PagePoint(D=32, plain=True),
        points=list(points(coded=False)),
        quick=quick(coded=False),
        compiled=partial(compiled, [((3, 4), False)], DTYPES, FORMS),
        bound=attention_bounds,
        heads={"out": 1},
        operations=operations_of_attention,
        takes={"block_table": "1"},
        invalid=wrong_attention,
        hostile=OUTSIDE,
    ),
    OpEntry(
        "aura_paged_attention_",
        draw=draw_coded,
        exact=exact_coded,
        small=PagePoint(plain=True, tail=8, means=True),
        points=list(points(coded=True)),
        quick=quick(coded=True),
        compiled=partial(compiled, CODES, [F32], FORMS[1:], (0, 1)),
        bound=attention_bounds,
        heads={"out": 1},
        operations=operations_of_attention,
        launches=3,
        scratch=True,
        takes={"block_table": "1"},
        invalid=wrong_coded,
        hostile=(
            *OUTSIDE[:2],
            Hostile("block_table", [[LARGE] * 2, [0] * 2, [-3] * 2]),
            *(Hostile(name, [LARGE, -LARGE, 4]) for name in ("exact_slots", "exact_sink_slots")),
        ),
    ),
)
