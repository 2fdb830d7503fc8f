"""A model of the least time that a kernel's counts allow on Apple's chips. It is not a measurement.

    python -m evidence.lab.studies.metal_model decode       one token of Qwen3-Next's 16/32 heads of 128 x 128
    python -m evidence.lab.studies.metal_model prefill --tokens 64 --chips M1 "M4 Max"
    python -m evidence.lab.studies.metal_model --help

The workload runs on the simulated device, which counts (mps_simulator.profile(detailed=True)). Each count is divided by
the chip's rate for it. If the rate is right, no run of these kernels on that chip can take less time:

    memory        distinct bytes, over the memory's bandwidth
    cache         bytes of all simdgroup accesses to device memory, over what a core takes from the cache outside it
    arithmetic    scalar operations and 8x8x8 matrix products (512 multiply-adds at the scalar rate)
    issue         instructions, of which each of a core's four schedulers starts one a cycle: as many as Mesa's code
                  for M1 and M2 needs at least for the sums, accesses, products and barriers that were counted
    threadgroup   cycles of the threadgroup memory's banks
    latency       what one simdgroup does in turn, arithmetic or instructions, and waits (for barriers, and for loads
                  wherever a barrier keeps later ones from starting), times the turns that a core takes: it holds so
                  many threadgroups at once as threads, threadgroup memory and registers allow, the latter as Mesa's
                  compiler allots them

The largest of them is the kernel's bound. Dispatches run one after another, so their bounds add up. We assume that all
threadgroups are alike, so the core with the most threadgroups decides. Everything else that the chip does (a dispatch's
own start, caches that miss, clocks below the highest) makes it slower: a decode step took 95 us whose traffic takes 8.
It can only be faster if the system's cache (memory) or a core's 8 KB (cache) still holds data of the previous dispatch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from bench.metal_workloads import WORKLOADS, Shape
from bench.results import markdown
from bench.shapes import LAYERS, QWEN3_NEXT
from evidence.lab.agx import issue
from evidence.lab.agx.table import Table, compiled_figures, recorded
from evidence.proof.metal.facts import ISA_REGISTERS
from evidence.proof.metal.kernels import check_batch
from torch_gdn import recording
from torch_gdn._recorder import KernelVariant

SIMDGROUP = 32  # threads


class Chip(NamedTuple):
    """A chip with all its GPU cores. GHz is given if it was measured. Otherwise it follows from teraflops."""

    family: int  # MTLGPUFamilyApple...
    cores: int
    bandwidth: float  # GB/s
    teraflops: float  # float32; a multiply-add counts as two
    sources: str

    @property
    def hertz(self) -> float:
        return self.teraflops * 1e12 / (2 * LANES * self.cores)


# These are rates of one core. No source finds them different between chips.
LANES = 128  # multiply-adds per cycle, in float32 and float16 [metal-benchmarks]
MATRIX_LANES = 102  # multiply-adds per cycle with simdgroup_matrix [metal-benchmarks: 101.7 and 102.5]
SCHEDULERS = 4  # each starts a simdgroup's instruction per cycle [metal-benchmarks]
CACHE_BYTES = 32  # per cycle, from the cache outside the core [metal-benchmarks]
THREADGROUP_MEMORY = 60 * 1024  # bytes [metal-benchmarks]
REGISTERS = 208 * 1024  # bytes [metal-benchmarks]
MOST_THREADS = 3072  # [metal-benchmarks: 24 simdgroups of four pipelines]
# These are the cycles that an operation on floats takes in its pipeline [metal-benchmarks; a division is a reciprocal,
# and another function counts as an exp2]. Integer operations, comparisons, selections and conversions are counted, but
# cost nothing: those that clang leaves need not be those that Apple's compiler needs, and a lower bound must not depend
# on them.
OPERATION_CYCLES: Mapping[str, float] = {
    **dict.fromkeys(("fma", "add", "mul", "minmax", "round"), 1),
    **dict.fromkeys(("exp", "log", "other"), 4),
    **{"div": 6, "sqrt": 8, "rsqrt": 8},
}
# These are assumed cycles that a simdgroup waits at a barrier, for a collective operation (simd_sum, simdgroup_load,
# ...), and for what it loads from device memory between two barriers, all of it in flight at once.
BARRIER_LATENCY, COLLECTIVE_LATENCY, LOAD_LATENCY = 20.0, 10.0, 200.0

# Sources: MB is github.com/philipturner/metal-benchmarks, measured on M1 and M2. Apple is bandwidths that it announced.
# Press is bandwidths of tables in the press, not traced to Apple. HF is hardware.ts of Hugging Face, for the float32
# rates. MT is michaelstinkerings.org, measured on an M5: 3.76 teraflops, 94 % of 10 cores at 1.578 GHz, and 122 of
# 153.6 GB/s.
CHIPS: Mapping[str, Chip] = {
    "M1": Chip(7, 8, 68.2, 2.62, "MB"),
    "M1 Pro": Chip(7, 16, 204.8, 5.31, "MB"),
    "M1 Max": Chip(7, 32, 409.6, 10.6, "MB"),
    "M1 Ultra": Chip(7, 64, 819.2, 21.2, "MB"),
    "M2": Chip(8, 10, 102.4, 3.58, "MB"),
    "M2 Pro": Chip(8, 19, 204.8, 6.80, "MB, press"),
    "M2 Max": Chip(8, 38, 409.6, 13.6, "MB"),
    "M3": Chip(9, 10, 102.4, 4.1, "press, HF"),
    "M3 Pro": Chip(9, 18, 153.6, 7.4, "press, HF"),
    "M3 Max": Chip(9, 40, 400.0, 16.4, "press; derived from the M3's rate"),
    "M4": Chip(9, 10, 120.0, 4.6, "press, HF"),
    "M4 Pro": Chip(9, 20, 273.0, 9.2, "press, HF"),
    "M4 Max": Chip(9, 40, 546.0, 18.4, "Apple, HF"),
    "M5": Chip(10, 10, 153.6, 4.04, "Apple, MT"),
    "M5 Pro": Chip(10, 20, 307.0, 8.08, "Apple; derived from the M5's rate"),
    "M5 Max": Chip(10, 40, 614.0, 16.2, "Apple; derived from the M5's rate"),
}


class Prediction(NamedTuple):
    """The seconds of one kernel's dispatches together, and their parts."""

    bounds: Mapping[str, float]  # memory, cache, arithmetic, issue, threadgroup, latency -> seconds
    cores: int  # cores that have a threadgroup
    threads: int  # threads that a core holds at once

    @property
    def seconds(self) -> float:
        return max(self.bounds.values())

    @property
    def binds(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])


class Code(NamedTuple):
    """A compiler's figures for a kernel."""

    registers: int = 0  # 32-bit registers per thread; 0 is unknown
    prices: Mapping[str, int] = {}  # hundredths of an instruction: evidence/lab/agx/issue.py; {} is unknown


UNKNOWN = Code()


@cache
def estimated_code(variant: KernelVariant) -> Code:
    """Returns what evidence/lab/agx/isa.tsv has for the pipeline that is nearer to Apple's compiler. For other variants
    it returns only registers, by the model of evidence/proof/metal/facts.py and at most as many as exist, which takes
    seconds each.
    """
    of = recorded_figures().get(variant.name, {})
    figures = compiled_figures({pipeline: of[pipeline] for pipeline in ("lean", "O2") if pipeline in of})
    if figures:
        return Code(figures[0].registers, {kind: getattr(figures[0], f"issue_{kind}") for kind in issue.KINDS})
    (facts,) = check_batch([variant]).facts
    return Code(min(facts.registers, ISA_REGISTERS))


@cache
def recorded_figures() -> Table:
    return recorded()[1]


def count(call: Callable[[], object]) -> tuple[Mapping[str, Any], Mapping[str, Code]]:
    """Returns each kernel's figures in a detailed profile, by its name, and the code of our own kernels."""
    import mps_simulator

    with mps_simulator.profile(detailed=True) as profile:
        call()
    with recording() as recorded:
        call()
    return profile.kernels, {variant.name: estimated_code(variant) for variant in recorded.variants}


def groups_at_once(figures: Any, threads: int, registers: int) -> int:
    """Returns how many threadgroups of this size a core holds, by its threads, threadgroup memory and registers."""
    limits = [MOST_THREADS // threads]
    if figures.threadgroup_memory:
        limits.append(THREADGROUP_MEMORY // figures.threadgroup_memory)
    if registers:
        limits.append(REGISTERS // (4 * registers * threads))
    return max(1, min(limits))


def arithmetic_cycles(figures: Any) -> float:
    """Returns the cycles that one core's 128 lanes take for all the work."""
    scalar = sum(count * OPERATION_CYCLES.get(kind, 0) for kind, count in figures.operations_issued.items())
    return scalar / LANES + figures.matrix_multiplies * 8 * 8 * 8 / MATRIX_LANES


def instructions(figures: Any, code: Code) -> float:
    """Returns the fewest instructions that all simdgroups issue for all the work."""
    simdgroups = simdgroups_of(figures)
    counted = {
        "start": simdgroups,
        "float": sum(figures.operations_issued.get(kind, 0) for kind in ("fma", "add", "mul")) / SIMDGROUP,
        "device": figures.device_accesses,
        "threadgroup": figures.threadgroup_accesses,
        "barrier": figures.barriers * simdgroups / max(1, figures.threadgroups),
        "matrix": figures.matrix_multiplies,
    }
    return sum(price * counted[kind] for kind, price in code.prices.items()) / 100


def simdgroups_of(figures: Any) -> int:
    threads = max(1, figures.threads // max(1, figures.threadgroups))
    return -(-threads // SIMDGROUP) * max(1, figures.threadgroups)


def predict(figures: Any, chip: str | Chip, code: Code = UNKNOWN) -> Prediction:
    """Returns the lower bound for a kernel's dispatches on a chip, from its figures in a detailed profile."""
    chip = CHIPS[chip] if isinstance(chip, str) else chip
    dispatches = max(1, figures.dispatches)
    groups = max(1, figures.threadgroups // dispatches)
    cores = min(chip.cores, groups)
    share = -(-groups // chip.cores) / groups  # the busiest core's part of the work
    threads = max(1, figures.threads // max(1, figures.threadgroups))
    at_once = min(groups_at_once(figures, threads, code.registers), -(-groups // chip.cores))
    simdgroups = simdgroups_of(figures)

    distinct = figures.device_bytes_distinct_read + figures.device_bytes_distinct_written
    issued = figures.device_bytes_issued_read + figures.device_bytes_issued_written
    arithmetic, started = arithmetic_cycles(figures), instructions(figures, code)
    # One simdgroup's path is its arithmetic at a quarter of the core, or an instruction per cycle, and its waits.
    others = figures.collectives - figures.matrix_multiplies
    waits = figures.barriers / max(1, figures.threadgroups) * BARRIER_LATENCY + others / simdgroups * COLLECTIVE_LATENCY
    waits += figures.load_rounds / simdgroups * LOAD_LATENCY
    alone = max(SCHEDULERS * arithmetic, started) / simdgroups + waits
    rounds = -(-groups // (chip.cores * at_once))
    bounds = {
        "memory": distinct / (chip.bandwidth * 1e9),
        "cache": issued * share / CACHE_BYTES / chip.hertz,
        "arithmetic": arithmetic * share / chip.hertz,
        "issue": started / SCHEDULERS * share / chip.hertz,
        "threadgroup": figures.bank_cycles * share / chip.hertz,
        "latency": dispatches * rounds * alone / chip.hertz,
    }
    return Prediction(bounds, cores, at_once * threads)


def predict_all(kernels: Mapping[str, Any], codes: Mapping[str, Code], chip: str | Chip) -> list[Prediction]:
    """Predicts each kernel of a profile. A kernel with unknown code takes no registers and no instructions."""
    return [predict(figures, chip, codes.get(name, UNKNOWN)) for name, figures in kernels.items()]


def total(kernels: Mapping[str, Any], codes: Mapping[str, Code], chip: str | Chip) -> tuple[float, str]:
    """Returns the seconds of a workload whose kernels run one after another, and what limits the longest part."""
    predictions = predict_all(kernels, codes, chip)
    parts: dict[str, float] = {}
    for prediction in predictions:
        parts[prediction.binds] = parts.get(prediction.binds, 0) + prediction.seconds
    return sum(parts.values()), max(parts, key=lambda name: parts[name])


# ---- the program -------------------------------------------------------------------------------------------------


def ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else ""


def counts_table(kernels: Mapping[str, Any], codes: Mapping[str, Code]) -> str:
    rows = []
    for name, figures in kernels.items():
        issued = figures.device_bytes_issued_read + figures.device_bytes_issued_written
        distinct = figures.device_bytes_distinct_read + figures.device_bytes_distinct_written
        rows.append(
            [
                name,
                f"{figures.threadgroups}",
                f"{figures.threadgroup_memory}",
                f"{codes[name].registers}" if name in codes else "",
                f"{distinct:,}",
                ratio(issued, distinct),
                ratio(figures.least_cache_lines, figures.cache_lines),
                ratio(figures.load_rounds, figures.threads // SIMDGROUP),
                ratio(issued, figures.device_accesses * SIMDGROUP),
                f"{figures.threadgroup_accesses}",
                ratio(figures.bank_cycles, figures.least_bank_cycles),
                f"{figures.barriers}",
                f"{figures.collectives - figures.matrix_multiplies}",
                f"{figures.matrix_multiplies}",
                f"{sum(n for kind, n in figures.operations.items() if kind in OPERATION_CYCLES):,}",
                f"{sum(n for kind, n in figures.operations.items() if kind not in OPERATION_CYCLES):,}",
                f"{instructions(figures, codes[name]):,.0f}" if name in codes else "",
            ]
        )
    titles = [
        "kernel",
        "threadgroups",
        "memory of one",
        "registers",
        "distinct bytes",
        "issued / distinct",
        "coalesced",
        "load rounds",
        "bytes a lane's access",
    ]
    titles += [
        "threadgroup accesses",
        "bank cycles / least",
        "barriers",
        "simd ops",
        "matrix products",
        "float operations",
        "others",
        "instructions, at least",
    ]
    return markdown(titles, rows)


def chips_table(kernels: Mapping[str, Any], codes: Mapping[str, Code], chips: list[str]) -> str:
    rows = []
    for name in chips:
        seconds, binds = total(kernels, codes, name)
        parts = predict_all(kernels, codes, name)
        summed = [f"{1e6 * sum(part.bounds[bound] for part in parts):.1f}" for bound in parts[0].bounds]
        rows.append([name, f"{1e6 * seconds:.1f}", binds, *summed])
    names = [f"{bound}, us" for bound in predict(next(iter(kernels.values())), chips[0]).bounds]
    return markdown(["chip", "lower bound, us", "bound by", *names], rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m evidence.lab.studies.metal_model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument(
        "--tokens", type=int, default=64, help="tokens of a sequence; decode has one. Default: %(default)s"
    )
    parser.add_argument("--batch", type=int, default=1, help="number of sequences. Default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--algorithm", help="prefill algorithm, as in `torch_gdn tune`. Default: by its table")
    parser.add_argument("--model", choices=[layer.model for layer in LAYERS], default=QWEN3_NEXT.model)
    parser.add_argument(
        "--chips", nargs="+", choices=CHIPS, metavar="CHIP", default=list(CHIPS), help="chips, such as M1 'M4 Max'"
    )
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    import mps_simulator

    mps_simulator.activate()
    options = parse(arguments)
    layer = next(layer for layer in LAYERS if layer.model == options.model)
    shape = Shape(layer, options.tokens, options.batch, getattr(torch, options.dtype), options.algorithm)
    workload = WORKLOADS[options.workload](shape)
    kernels, codes = count(workload.call)
    issued = sum(k.device_bytes_issued_read + k.device_bytes_issued_written for k in kernels.values())
    distinct = sum(k.device_bytes_distinct_read + k.device_bytes_distinct_written for k in kernels.values())
    moved = workload.compulsory_bytes
    print(f"{options.workload}, {layer}, {options.dtype}, T {workload.tokens}, B {options.batch}")
    print(
        f"compulsory bytes {moved:,}; distinct {distinct / moved:.2f} times, issued {issued / moved:.2f} times that\n"
    )
    print(counts_table(kernels, codes))
    print("\nA model, not a measurement: no run of these kernels can be below the bound, if the chip's rates hold.\n")
    print(chips_table(kernels, codes, options.chips))


if __name__ == "__main__":
    main()
