"""Times one token's attention to a cache: AURA's codes, and PyTorch's attention to float16, bfloat16 and float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench import counting
from bench.ceilings import Ceilings
from bench.results import OURS, Row
from bench.shapes import ATTENTIONS, Attention
from bench.timing import Call, measure
from torch_gdn.aura import KVCache
from torch_gdn_check.registry.bounds import relative_error

DEPTHS = (0, 2048, 8192, 32768, 131072)  # tokens before the one that attends
DEEP_SCHEMES = ("8v4", "4v4", "4v4t")  # timed at every depth; others at DEPTH
DEPTH = 8192
SCHEMES = ("8v8", "8v4", "8v4t", "5v5", "4v4", "4v4t", "4v2", "3v3", "3v3t", "2v2", "2v2t")
LARGEST_ERROR = 1e-4  # ours, against float64 attention to the decoded cache with q in float32


def jobs(quick: bool) -> Iterator[tuple[Attention, int, str]]:
    for layer in ATTENTIONS:
        if quick:
            yield layer, 256, "8v4"
            continue
        for depth in DEPTHS:
            for scheme in SCHEMES if depth == DEPTH else DEEP_SCHEMES:
                yield layer, depth + 1, scheme


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def run(layer: Attention, tokens: int, scheme: str, ceilings: Ceilings, seconds: float) -> list[Row]:
    torch.manual_seed(0)
    device = ceilings.device
    q = torch.randn(1, layer.HQ, 1, layer.D)
    k, v = (torch.randn(1, layer.HK, tokens, layer.D) for _ in range(2))
    cache = KVCache(scheme, 1, layer.HK, layer.D, tokens, device=device, dtype=torch.float32)
    cache.append(k.to(device), v.to(device))

    def row_of(contender: str, dtype: str, bytes_of_cache: int) -> Row:
        row = Row("aura", str(layer), dtype, tokens, contender, torch.get_num_threads())
        work = counting.attention(layer, tokens, bytes_of_cache)
        row.work(work)
        row.floor = work.floor(ceilings.products(torch.float32), ceilings.bytes_a_second(work.bytes))
        return row

    query = q.to(device)
    rows, calls = [], dict[str, Call]()

    def add(row: Row, call: Callable[[], Tensor]) -> None:
        rows.append(row)
        calls[row.contender] = call

    ours = row_of(OURS, scheme, cache.bytes_used)
    decoded = (x.double().cpu() for x in cache.decoded(torch.float32))
    ours.error = relative_error(cache.attend(query).cpu().double(), attend(q.double(), *decoded))
    if ours.error <= LARGEST_ERROR:
        add(ours, lambda: cache.attend(query))
    else:
        ours.note = "wrong: not timed"
        rows.append(ours)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        on_device = [x.to(device, dtype) for x in (q, k, v)]
        name = str(dtype).removeprefix("torch.")
        row = row_of(f"attention to {name}", scheme, on_device[1].nbytes + on_device[2].nbytes)
        add(row, lambda tensors=on_device: attend(*tensors))  # type: ignore[misc]
    times = measure(calls, device, seconds)
    for row in rows:
        if row.contender in times:
            row.time(times[row.contender])
    return rows
