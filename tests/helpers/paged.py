"""Paged caches and calls for the tests of paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.aura import moved

OPS = ("reshape_and_cache_", "paged_attention_")
Call = dict[str, Any]


def pool(blocks: int, block_size: int, heads: int, D: int, dtype: torch.dtype, layout: str = "pages") -> list[Tensor]:
    """Keys and values [blocks, block_size, heads, D] of NaN.

    `pages`: one buffer, a page is [heads, block_size, 2 D], as vLLM lays it out; `padded`: the same with three
    elements between the pages, so that no vector is aligned; `apart`: a tensor each.
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
    """Arguments of torch_gdn.paged_attention: sequences whose blocks are shuffled, in a pool of NaN; the first
    `shared_blocks` blocks of all sequences are the same ones. What is not to be read is NaN, or a block of no pool.
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
    q = 1.5 * torch.randn(T, HQ + 2 * HK, D)[:, :HQ]  # of one projection
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


def there(call: Call, device: torch.device) -> Call:
    """On a device, with strides and gaps; tensors that share memory still do."""
    storages: dict[int, Tensor] = {}
    found: Call = {}
    for name, x in call.items():
        if isinstance(x, Tensor):
            memory = x.untyped_storage()
            if memory.data_ptr() not in storages:
                whole = x.as_strided((memory.size() // x.element_size(),), (1,), 0)
                storages[memory.data_ptr()] = whole.to(device, copy=True)
            x = storages[memory.data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset())
        found[name] = x
    return found


def valid_call(op: str, device: torch.device) -> Call:
    """Keyword arguments of torch.ops.gdn.<op>: a prompt, a sequence without queries, one token; 5 to store."""
    if op == "reshape_and_cache_":
        key_cache, value_cache = (x.nan_to_num(0.0) for x in pool(3, 8, 2, 32, torch.float32, "apart"))
        key, value = torch.randn(5, 2, 32), torch.randn(5, 2, 32)
        call = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
        call["slot_mapping"] = torch.tensor([3, 23, -1, 8, 0])
    else:
        call = make_call([9, 0, 1], [20, 4, 33], D=32, block_size=8, padding=1) | {"window": 30}
        call["block_table"] = call["block_table"].clamp(max=0)
        call["q"], call["out"] = call["q"].nan_to_num(0.0).contiguous(), call["out"].contiguous()
        for name in ("key_cache", "value_cache"):
            call[name] = call[name].nan_to_num(0.0).contiguous()
        call["sinks"] = torch.randn(4)
    return {name: moved(x, device, True) if isinstance(x, Tensor) else x for name, x in call.items()}
