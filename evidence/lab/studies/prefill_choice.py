"""Compares the heuristic that picks a prefill algorithm with evidence.lab.studies.metal_model. Nothing is measured.

    python -m evidence.lab.studies.prefill_choice          half a minute on two cores

The three algorithms run on the simulated device, which counts, for two value heads of 128 x 128 in bfloat16. Counts for
more heads are multiples. Each chunk of 64 tokens after the second adds the same counts, except for the few operations
that depend on the data. For each number of heads and each chip, the table says what the heuristic chooses, and by how
much the model's best choice is faster. It then says which thresholds would lose least, and how much they and the
present ones lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from bench.metal_workloads import WORKLOADS, Shape
from bench.results import markdown
from bench.shapes import QWEN3_NEXT, Layer
from evidence.lab.studies import metal_model
from evidence.lab.studies.metal_model import CHIPS, Code
from torch_gdn import _C

ALGORITHMS = tuple(_C.prefill_algorithms())
OPS = {"prefill": "the delta rule", "kda-prefill": "Kimi Delta Attention"}
LAYER = QWEN3_NEXT._replace(H=1, HV=2)
CHUNK = 64  # tokens
FEW_TOKENS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)
CHUNKS = (1, 2, 4, 5, 6, 7, 8, 16)
HEADS = (*range(1, 11), 12, 16, 20, 24, 32, 48, 64)
# Each row of the table has a largest number of threadgroups per core, and a range of tokens.
SHARES = (0.5, 1, 1.6, 4, math.inf)
TOKENS = ((2, 4), (5, 6), (7, 8), (9, 16), (64, 128), (256, 320), (384, 1024))
# These thresholds are tried: the fewest tokens for fused_chunk and for chunked, and chunked's most threadgroups per
# core.
FUSED_FROM = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 64)
CHUNKED_FROM = (64, 128, 256, 320, 384, 448, 512, 1024)
MOST_SHARES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.3, 1.6, 2, 2.5, 3, 4, 6, 100)
NOTHING = 1.005  # the table omits a smaller difference
NOT_COUNTS = ("dispatches", "threadgroup_memory", "seconds")  # equal for any number of heads

Counts = Mapping[str, SimpleNamespace]  # by the kernel's name


class Case(NamedTuple):
    """A prefill on a chip, with the model's seconds for each algorithm."""

    tokens: int
    share: float  # threadgroups of fused_chunk per core
    chosen: str  # by the heuristic
    seconds: Mapping[str, float]

    def loss(self, algorithm: str) -> float:
        return self.seconds[algorithm] / min(self.seconds.values())


class Thresholds(NamedTuple):
    fused_from: int  # tokens
    chunked_from: int
    most_share: float  # for chunked

    def choose(self, case: Case) -> str:
        if case.tokens >= self.chunked_from and case.share <= self.most_share:
            return "chunked"
        return "fused_chunk" if case.tokens >= self.fused_from else "recurrent"


def combined(one: Counts, other: Counts, combine: Callable[[float, float], float]) -> Counts:
    """Combines each count of two runs of the same kernels."""

    def each(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping):
            return {kind: combine(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}
        return combine(a, b)

    return {
        name: SimpleNamespace(**{key: each(value, vars(other[name])[key]) for key, value in vars(of).items()})
        for name, of in one.items()
    }


def for_chunks(one: Counts, two: Counts, chunks: int) -> Counts:
    return combined(one, two, lambda a, b: a + (chunks - 1) * (b - a))


def for_heads(counts: Counts, factor: float) -> Counts:
    more = combined(counts, counts, lambda a, _: a * factor)
    for name, of in more.items():
        of.__dict__.update({key: vars(counts[name])[key] for key in NOT_COUNTS if key in vars(of)})
        of.threads, of.threadgroups = round(of.threads), round(of.threadgroups)
    return more


def count(workload: str, layer: Layer, tokens: int, algorithm: str) -> tuple[Counts, Mapping[str, Code]]:
    work = WORKLOADS[workload](Shape(layer, tokens, 1, torch.bfloat16, algorithm))
    kernels, codes = metal_model.count(work.call)
    names = [name for name in dir(next(iter(kernels.values()))) if not name.startswith("_")]
    counts = {name: {key: getattr(of, key) for key in names} for name, of in kernels.items()}
    numbers = (int, float, Mapping)
    return {
        name: SimpleNamespace(**{key: value for key, value in of.items() if isinstance(value, numbers)})
        for name, of in counts.items()
    }, codes


def all_cases(workload: str) -> list[Case]:
    counted: dict[int, dict[str, Counts]] = {}
    codes: dict[str, Code] = {}
    for algorithm in ALGORITHMS:
        for tokens in (*FEW_TOKENS, CHUNK, 2 * CHUNK):
            counts, result = count(workload, LAYER, tokens, algorithm)
            counted.setdefault(tokens, {})[algorithm] = counts
            codes |= result
    for chunks, algorithm in product(CHUNKS[2:], ALGORITHMS):
        one, two = counted[CHUNK][algorithm], counted[2 * CHUNK][algorithm]
        counted.setdefault(chunks * CHUNK, {})[algorithm] = for_chunks(one, two, chunks)
    cases = []
    for tokens, heads in product(counted, HEADS):
        scaled = {name: for_heads(counts, heads / LAYER.HV) for name, counts in counted[tokens].items()}
        for chip, facts in CHIPS.items():
            chosen = _C.prefill_algorithm(tokens, heads, 128, 128, "", facts.cores, workload == "kda-prefill")[0]
            seconds = {name: metal_model.total(counts, codes, chip)[0] for name, counts in scaled.items()}
            cases.append(Case(tokens, 4 * heads / facts.cores, chosen, seconds))
    return cases


def loss(cases: Sequence[Case], choose: Callable[[Case], str]) -> tuple[float, float]:
    """Returns the loss compared with the model's best choices: on average, and at most."""
    losses = [case.loss(choose(case)) for case in cases]
    return math.exp(sum(map(math.log, losses)) / len(losses)), max(losses)


def best_thresholds(cases: Sequence[Case]) -> Thresholds:
    tried = (Thresholds(*each) for each in product(FUSED_FROM, CHUNKED_FROM, MOST_SHARES))
    return min(tried, key=lambda thresholds: loss(cases, thresholds.choose))


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def cases_table(cases: Iterable[Case]) -> str:
    groups: dict[tuple[tuple[int, int], float, str], list[Case]] = {}
    for case in cases:
        tokens = next(of for of in TOKENS if case.tokens <= of[1])
        share = next(most for most in SHARES if case.share <= most)
        groups.setdefault((tokens, share, case.chosen), []).append(case)
    rows = []
    for ((first, last), share, chosen), of in sorted(groups.items()):
        behind = [case for case in of if case.loss(chosen) > NOTHING]
        others = {name: [case.loss(chosen) for case in behind if case.loss(name) == 1] for name in ALGORITHMS}
        ahead = [f"{name} in {len(all_)}, by up to {percent(max(all_))}" for name, all_ in others.items() if all_]
        least = max((0, *(most for most in SHARES if most < share)))
        shares = f"over {least}" if share == math.inf else f"{least} to {share}"
        rows.append([f"{first} to {last}", shares, chosen, f"{len(of)}", "; ".join(ahead)])
    return markdown(["tokens", "threadgroups a core", "heuristic", "cases", "the model's best where another"], rows)


@torch.no_grad()
def main() -> None:
    import mps_simulator

    mps_simulator.activate()
    print("A model, not a measurement.")
    for workload, title in OPS.items():
        cases = all_cases(workload)
        best = best_thresholds(cases)
        print(f"\n{title}: {len(cases)} cases\n\n{cases_table(cases)}\n")
        print("loses over the model's best choice, on average and at most:")
        for name, (average, most) in {
            "the heuristic": loss(cases, lambda case: case.chosen),
            f"{best}": loss(cases, best.choose),
        }.items():
            print(f"    {percent(average)}, {percent(most)}: {name}")


if __name__ == "__main__":
    main()
