"""Measures how fast the ops are, compared with the machine's limits and with other installed projects.

    python -m bench                       every section except the four below; a quarter of an hour on two cores
    python -m bench --only decode aura    some sections
    python -m bench --only serving        whole servers; another quarter of an hour
    python -m bench --only model          a layer and a model of transformers; four minutes
    python -m bench --only host           what a call on mps costs the host, on the simulated device
    python -m bench --only launches --model Qwen3.5-0.8B
                                          what a step of a model launches, by part; without --model, of all models
    python -m bench --quick               tiny shapes, to see whether everything runs
    python -m mps_simulator -m bench --device mps --quick    the same on the simulated device, whose times mean nothing

First it counts the operations of the work and the bytes that it must move. The floor is the larger of two times: the
operations at the rate of the device's own matrix products, and the bytes at the rate of a copy, both measured in this
run. Then it compares each contender with a float64 recurrence. Then it times all of them in turn. Ratios are within one
run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from bench import (
    aura,
    gdn,
    host,
    kda,
    launch_models,
    launches,
    metal,
    models,
    modules,
    overhead,
    plots,
    results,
    serving,
    vllm_kernels,
)
from bench.ceilings import Ceilings
from bench.results import Row
from bench.shapes import QWEN3_NEXT, Layer
from torch_gdn.tools import info

Job = Callable[[], list[Row]]
FOLDER = Path(__file__).parent


class Section(NamedTuple):
    title: str
    size_name: str
    jobs: Callable[[bool], Iterator[Any]]
    run: Callable[..., list[Row]]


def scaling_jobs(quick: bool) -> Iterator[tuple[str, torch.dtype, int]]:
    cores = os.cpu_count() or 1
    for what, dtype in (("prefill", torch.float32), ("prefill", torch.bfloat16), ("decode", torch.float32)):
        for threads in sorted({2**n for n in range(cores.bit_length())} | {cores}):
            yield what, dtype, threads


def scaling(what: str, dtype: torch.dtype, threads: int, ceilings: Ceilings, seconds: float) -> list[Row]:
    """Times the same work with one core up to all of them, next to the machine's own limits with as many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    own = Ceilings(ceilings.device)
    try:
        if what == "prefill":
            rows = gdn.prefill(QWEN3_NEXT, 2048, dtype, own, seconds, names=(results.OURS,))
        else:
            rows = gdn.decode(QWEN3_NEXT, 64, dtype, own, seconds, names=(results.OURS,))
    finally:
        torch.set_num_threads(before)
    for row in rows:
        row.section, row.case = "scaling", f"{what}, {threads} threads"
    return rows


def sweep(layer: Layer, tokens: int, dtype: torch.dtype, ceilings: Ceilings, seconds: float) -> list[Row]:
    return gdn.prefill(layer, tokens, dtype, ceilings, seconds / 4, "sweep", gdn.SWEEP_CONTENDERS)


SECTIONS = {
    "prefill": Section("Prefill: from a state over T tokens to the next", "T", gdn.prefill_jobs, gdn.prefill),
    "decode": Section("Decode: one token of B sequences, the state in place", "B", gdn.decode_jobs, gdn.decode),
    "kda": Section("Kimi Delta Attention: prefill of T tokens, decoding of B sequences", "T or B", kda.jobs, kda.run),
    "modules": Section("The small ops next to a copy and exponentials", "T", modules.jobs, modules.run),
    "vllm": Section(
        "vLLM's kernels for the CPU, as an engine calls them", "T or B", vllm_kernels.jobs, vllm_kernels.run
    ),
    "aura": Section("AURA: one token's attention to a cache of T tokens", "T", aura.jobs, aura.run),
    "overhead": Section("Host overhead of tiny shapes", "T", overhead.jobs, overhead.run),
    "host": Section("A call on mps without its encoding, simulated", "T", host.jobs, host.run),
    "launches": Section("Launches of a step of transformers' models", "batch", launches.jobs, launches.run),
    "scaling": Section("From one core to all", "size", scaling_jobs, scaling),
    "sweep": Section("Every length and number of heads, next to the fallback", "T", gdn.sweep_jobs, sweep),
    "serving": Section("Servers: requests of clients that each wait for their answer", "", serving.jobs, serving.run),
    "model": Section("A layer and a model of transformers, and what their time goes to", "T", models.jobs, models.run),
    "metal": Section("The Metal kernels as the simulated device counts them", "T", metal.jobs, metal.run),
}


BY_NAME = ("serving", "model", "host", "launches")  # slow, or for the simulated device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    usual = [name for name in SECTIONS if name not in BY_NAME]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=usual,
        help=f"sections to run; default: all but {', '.join(BY_NAME)}",
    )
    parser.add_argument("--model", choices=launch_models.MODELS, help="the model of the section launches; default: all")
    parser.add_argument("--device", choices=("cpu", "mps"), help="default: mps if PyTorch has it, else cpu")
    parser.add_argument("--threads", type=int, help="threads of the CPU; default: PyTorch's")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time for each contender and size; default: %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try that everything runs")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="file for the rows; default: %(default)s")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the plots of docs/lab/benchmarks.md there")
    return parser.parse_args()


def ceilings_of(ceilings: Ceilings) -> dict[str, float]:
    """Returns rates per second, for the report."""
    return {
        "products float32": ceilings.products(torch.float32),
        "products bfloat16": ceilings.products(torch.bfloat16),
        "copy in cache": ceilings.bytes_a_second(2**21),
        "copy in memory": ceilings.bytes_a_second(2**29),
        "exponentials": 2**16 / ceilings.exponentials(2**16),
    }


def run(options: argparse.Namespace, ceilings: Ceilings) -> list[Row]:
    jobs = [(name, job) for name in options.only for job in SECTIONS[name].jobs(options.quick)]
    if options.model:
        jobs = [(name, job) for name, job in jobs if name != "launches" or job[0] == options.model]
    rows = []
    with tqdm(jobs, unit="size") as bar:
        for name, job in bar:
            bar.set_postfix_str(f"{name}: {', '.join(str(part) for part in job)}")
            rows += SECTIONS[name].run(*job, ceilings, 0.01 if options.quick else options.seconds)
    return rows


def others_table(rows: list[Row]) -> str:
    """Tabulates the other measurements of a section: their times and, in brackets, how many times as long ours is."""
    names = sorted({name for row in rows for name in row.others})
    lines = []
    for row in rows:
        if row.contender == results.OURS and row.others and row.seconds is not None:
            times = [
                f"{results.milliseconds(row.others[name])} ({row.seconds / row.others[name]:.2f})" for name in names
            ]
            largest = f"{row.seconds / max(row.others.values()):.2f}"
            lines.append([row.case, row.dtype, str(row.size), results.milliseconds(row.seconds), *times, largest])
    return results.markdown(["", "dtype", "size", "ours, ms", *names, "over the larger"], lines)


def report(rows: list[Row], rates: dict[str, float]) -> str:
    parts = ["Ceilings: " + ", ".join(f"{name} {rate / 1e9:.3g} G/s" for name, rate in rates.items())]
    for name, section in SECTIONS.items():
        result = [row for row in rows if row.section == name]
        if result and name == "launches":
            parts += [f"\n## {section.title}", *launches.tables(result)]
        elif any(row.counts for row in result):
            parts += [f"\n## {section.title}\n", metal.table(result)]
        elif result and name == "serving":
            parts += [f"\n## {section.title}\n", *serving.tables(result)]
        elif result and name == "model":
            parts += [f"\n## {section.title}\n", *models.tables(result)]
        elif result:
            tables = [results.table(result, section.size_name), "", results.summary(result, section.size_name)]
            parts += [f"\n## {section.title}\n", *tables]
        if any(row.others for row in result):
            parts += ["", others_table(result)]
    return "\n".join(parts)


@torch.no_grad()
def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("mps" if torch.backends.mps.is_available() else "cpu"))
    ceilings = Ceilings(device)
    system = info.versions() | info.system() | {"device": device.type}
    rates = ceilings_of(ceilings)
    rows = run(options, ceilings)
    print(report(rows, rates))
    results.write_json(options.json, system | {"ceilings": rates}, rows)
    print(f"\n{options.json}: {len(rows)} rows of {json.dumps(system)}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        plots.prefill_times(rows, options.plots / "prefill.png")
        plots.serving(rows, options.plots / "serving.png")
        plots.metal_bytes(rows, options.plots / "metal_bytes.png")


if __name__ == "__main__":
    main()
