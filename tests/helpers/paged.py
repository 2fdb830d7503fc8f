"""Paged caches and calls for the tests of paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.aura import Codec, moved
from torch_gdn import reference

OPS = ("reshape_and_cache_", "paged_attention_", "aura_paged_attention_")
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
            whole = storages[memory.data_ptr()].view(x.dtype)
            x = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        found[name] = x
    return found


def aura_pages(codec: Codec, cache: Tensor) -> tuple[list[Tensor], Tensor]:
    """Codes and norms of a cache [blocks, block_size, H, D], in pages [H, block_size, words] with gaps; and the vectors
    that they stand for, in float64. Where the cache has NaN norms are NaN.
    """
    blocks, size, H, _ = cache.shape
    codes, norms, _ = reference.aura_encode(cache.double().nan_to_num(0.0), *codec.tables)
    decoded = reference.aura_decode(codes, norms, codec.codebook, codec.signs, dtype=torch.float64)
    norms = norms.masked_fill(cache.isnan().any(-1), torch.nan)
    row = codec.words + 1
    whole = torch.full((blocks, H * size * row + 3), 0x5A5A5A5A, dtype=torch.int32)
    pages = whole[:, : H * size * row].view(blocks, H, size, row).transpose(1, 2)
    pages[..., :-1] = codes
    pages[..., -1] = norms.float().view(torch.int32)
    return [pages[..., :-1], pages[..., -1].view(torch.float32)], decoded


def valid_call(op: str, device: torch.device) -> Call:
    """Keyword arguments of torch.ops.gdn.<op>: a prompt, a sequence without queries, one token; 5 to store."""
    if op == "reshape_and_cache_":
        key_cache, value_cache = (x.nan_to_num(0.0) for x in pool(3, 8, 2, 32, torch.float32, "apart"))
        key, value = torch.randn(5, 2, 32), torch.randn(5, 2, 32)
        call = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
        call["slot_mapping"] = torch.tensor([3, 23, -1, 8, 0])
    else:
        call = make_call([9, 0, 1], [20, 4, 33], D=64 if op.startswith("aura") else 32, block_size=8, padding=1) | {
            "window": 30
        }
        call["block_table"] = call["block_table"].clamp(max=0)
        call["q"], call["out"] = call["q"].nan_to_num(0.0).contiguous(), call["out"].contiguous()
        for name in ("key_cache", "value_cache"):
            call[name] = call[name].nan_to_num(0.0).contiguous()
        call["sinks"] = torch.randn(4)
        if op.startswith("aura"):
            call = coded_call(call)
    return {name: moved(x, device, True) if isinstance(x, Tensor) else x for name, x in call.items()}


def coded_call(call: Call) -> Call:
    """With 3 bits for keys and 4 for values."""
    found = {name: x for name, x in call.items() if not name.endswith("_cache")}
    for name, codec in (("key", Codec(64, 3)), ("value", Codec(64, 4, 4))):
        codes, norms = (x.contiguous() for x in aura_pages(codec, call[f"{name}_cache"])[0])
        found |= {f"{name}_codes": codes, f"{name}_norms": norms}
        found |= {f"{name}_codebook": codec.codebook, f"{name}_signs": codec.signs}
    return found
