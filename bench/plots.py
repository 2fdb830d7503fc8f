"""Draws the plots of docs/lab/benchmarks.md from the rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.results import OURS, Row

COLOURS = {OURS: "C0", "transformers": "C1", "MLX": "C2", "ggml": "C3"}
LABELS = {"MLX": "MLX, CPU back end"}  # without the second part, a chart seems to show MLX on a Mac's GPU


def timed(rows: Sequence[Row], section: str) -> list[Row]:
    return [row for row in rows if row.section == section and row.seconds is not None]


def prefill_times(rows: Sequence[Row], path: Path) -> None:
    """Draws time over tokens, with a panel per dtype, for the layer that was measured at the most lengths."""
    result = timed(rows, "prefill")
    if not result:
        return
    layers = [row.case for row in result]
    layer = max(set(layers), key=layers.count)
    dtypes = sorted({row.dtype for row in result}, reverse=True)
    figure, axes = plt.subplots(1, len(dtypes), figsize=(5 * len(dtypes), 4), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for name, colour in COLOURS.items():
            points = sorted(
                (r.size, r.seconds)
                for r in result
                if (r.case, r.dtype, r.contender) == (layer, dtype, name) and r.seconds is not None
            )
            if points:
                axis.loglog(
                    *zip(*((size, 1e3 * seconds) for size, seconds in points), strict=True),
                    "o-",
                    color=colour,
                    label=LABELS.get(name, name),
                )
        floors = sorted({(r.size, r.floor) for r in result if (r.case, r.dtype) == (layer, dtype) and r.floor})
        axis.loglog(*zip(*((size, 1e3 * floor) for size, floor in floors), strict=True), "k:", label="ceiling")
        axis.set(title=f"prefill, {dtype}", xlabel="tokens", xscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("milliseconds")
    axes[0][0].legend()
    save(figure, f"{layer}, {result[0].threads} threads", path)


SERVERS = {  # contenders of the serving section
    "vLLM, torch_gdn": ("C0", "o-"),
    "vLLM": ("C0", "o:"),
    "transformers, torch_gdn": ("C1", "s-"),
    "transformers": ("C1", "s:"),
}


def serving(rows: Sequence[Row], path: Path) -> None:
    """Draws over clients: requests per second, time to the first token and between tokens (medians and 95 % points)."""
    result = timed(rows, "serving")
    if not result:
        return
    figure, (throughput, first, between) = plt.subplots(1, 3, figsize=(14, 4))
    for name, (colour, style) in SERVERS.items():
        named = sorted((row for row in result if row.contender == name), key=lambda row: row.size)
        clients = [row.size for row in named]
        throughput.plot(clients, [1 / row.seconds for row in named if row.seconds], style, color=colour, label=name)
        for axis, what in ((first, "first token"), (between, "between tokens")):
            median = [1e3 * row.latencies[what] for row in named]
            above = [1e3 * (row.latencies[f"{what}, p95"] - row.latencies[what]) for row in named]
            axis.errorbar(clients, median, [[0] * len(above), above], fmt=style, color=colour, capsize=3, label=name)
    for axis, title in ((throughput, "requests a second"), (first, "to the first token, ms"), (between, "between, ms")):
        axis.set(title=title, xlabel="clients", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    throughput.legend(fontsize=8)
    save(figure, f"{result[0].case}, bfloat16, {result[0].threads} threads; bars reach the 95 % point", path)


def metal_bytes(rows: Sequence[Row], path: Path) -> None:
    """Draws the device bytes of each workload on Metal, distinct and issued, as multiples of those that must move."""
    result = [row for row in rows if row.counts]
    if not result:
        return
    figure, axis = plt.subplots(figsize=(7, 0.45 * len(result) + 1.2))
    for offset, name in ((-0.2, "distinct bytes"), (0.2, "issued bytes")):
        widths = [row.counts[name] / row.bytes for row in result]
        axis.barh([i + offset for i in range(len(result))], widths, height=0.38, label=name)
    axis.axvline(1, color="k", linestyle=":", label="compulsory")
    axis.set_yticks(range(len(result)), [f"{row.case}, T {row.size}" for row in result])
    axis.invert_yaxis()
    axis.set_xlabel("times the compulsory bytes")
    axis.legend(fontsize=8)
    save(figure, "device memory traffic of the Metal kernels, counted on the simulated device", path)


def save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
