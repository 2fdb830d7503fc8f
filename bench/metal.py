"""Reports what the simulated device counts for the Metal kernels: bytes, barriers and matrix products.

This section has no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.modules import MODULES
from bench.results import OURS, Row, markdown
from bench.shapes import KIMI_LINEAR, QWEN3_NEXT
from torch_gdn import _C
from torch_gdn_check.steps import on_simulated_device

TOKENS = 128


def jobs(quick: bool) -> Iterator[tuple[str, str | None, int]]:
    """Yields workload, algorithm, tokens."""
    tokens = 16 if quick else TOKENS
    for algorithm in _C.prefill_algorithms():
        yield "prefill", algorithm, tokens
    yield "kda-prefill", "fused_chunk", tokens
    for workload in ("decode", "decode-v-first", "conv-update", *MODULES):
        yield workload, None, tokens


def run(workload: str, algorithm: str | None, tokens: int, ceilings: object, seconds: float) -> list[Row]:
    """Returns a row. `ceilings` and `seconds` are arguments of the sections that time."""
    row = Row("metal", f"{workload}, {algorithm}" if algorithm else workload, "bfloat16", tokens, OURS, 0)
    if not on_simulated_device():
        row.note = "not run: a Mac's own GPU does not count"
        return [row]
    import mps_simulator
    from bench.metal_workloads import WORKLOADS, Shape

    mps_simulator.activate()
    torch.manual_seed(0)
    layer = KIMI_LINEAR if workload.startswith("kda") else QWEN3_NEXT
    work = WORKLOADS[workload](Shape(layer, tokens, 1, torch.bfloat16, algorithm))
    with mps_simulator.profile(detailed=True) as profile:
        work.call()
    row.size, row.bytes, row.counts = work.tokens, work.compulsory_bytes, sums(profile.kernels)
    return [row]


def sums(kernels: Mapping[str, Any]) -> dict[str, int]:
    """Adds up the counts of all kernels of a workload, but takes the maximum of threadgroup memory."""
    added = {
        "launches": ("dispatches",),
        "threadgroups": ("threadgroups",),
        "distinct bytes": ("device_bytes_distinct_read", "device_bytes_distinct_written"),
        "issued bytes": ("device_bytes_issued_read", "device_bytes_issued_written"),
        "cache lines": ("cache_lines",),
        "least cache lines": ("least_cache_lines",),
        "threadgroup bytes": ("threadgroup_bytes_read", "threadgroup_bytes_written"),
        "bank cycles": ("bank_cycles",),
        "least bank cycles": ("least_bank_cycles",),
        "barriers": ("barriers",),
        "matrix products": ("matrix_multiplies",),
    }
    every = kernels.values()
    counts = {
        name: sum(getattr(kernel, field) for kernel in every for field in fields) for name, fields in added.items()
    }
    return counts | {"threadgroup memory": max(kernel.threadgroup_memory for kernel in every)}


def over(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else ""


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if row.counts):
        c = row.counts
        lines.append(
            [
                f"{row.case}, T {row.size}",
                f"{c['launches']}",
                f"{c['threadgroups']}",
                f"{c['threadgroup memory']:,}",
                f"{row.bytes:,}",
                over(c["distinct bytes"], row.bytes),
                over(c["issued bytes"], row.bytes),
                over(c["least cache lines"], c["cache lines"]),
                f"{c['threadgroup bytes']:,}",
                over(c["bank cycles"], c["least bank cycles"]),
                f"{c['barriers']:,}",
                f"{c['matrix products']:,}",
            ]
        )
    titles = ["workload", "launches", "threadgroups", "memory of one", "compulsory bytes", "distinct", "issued"]
    titles += ["coalesced", "threadgroup bytes", "bank cycles", "barriers", "matrix products"]
    return markdown(titles, lines)
