"""Counts what one decode step and one prefill of 512 tokens of a published model launch on `mps`, by part of the model.

`launch_counter` counts within `generate`, with transformers' own code and with torch_gdn enabled, and `compiled` with a
compiled forward. The model has four layers of random weights (three Gated DeltaNet, one attention), small matrices, and
the published model's heads and number of chosen experts. A total is the sum of what happens once, and of each kind of
layer as often as the published model has it. Bytes are those of the small matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import compiled, drafted_launches
from bench.launch_counter import ONCE, Counts, LaunchCounter, Place, counting
from bench.launch_models import KINDS, MODELS, PROMPT, SMALL, TOTAL, configuration, small_model
from bench.results import OURS, Row, markdown
from torch_gdn_check.steps import on_simulated_device

TRANSFORMERS = "transformers"
COMPILED = f"{OURS}, torch.compile"
DECODE, PREFILL, DRAFTS = "decode", "prefill", "decode with drafts"
PREFILL_TOKENS, QUICK_TOKENS = 512, 80
DECODED = 4  # tokens that generate makes; the last but one step is counted


@dataclass(frozen=True)
class Part:
    """The counts of a part of one kind of layer, and how many such layers the published model has."""

    kind: str  # the layer's kind, or ONCE outside all layers
    name: str
    layers: int
    counts: Counts

    def __str__(self) -> str:
        return ONCE if self.kind == ONCE else f"{self.layers} {self.kind.split('_')[0]} layers: {self.name}"


def steps(model: Any, batch: int, prompt: int) -> list[dict[Place, Counts]]:
    """Returns the counts of each step of `generate`, from the start of one forward to the start of the next."""
    ids = torch.randint(1, SMALL["vocab_size"], (batch, prompt)).to(model.device)
    mask = torch.ones_like(ids)
    result: list[dict[Place, Counts]] = [{}]

    def start() -> None:
        result.append({})
        counter.counts = result[-1]

    counter: LaunchCounter
    with counting(model, start) as counter:
        model.generate(ids, attention_mask=mask, max_new_tokens=DECODED, do_sample=False)
    return result[1:]


def parts_of(name: str, counts: dict[Place, Counts]) -> list[Part]:
    """Merges the layers of each kind.

    Raises: RuntimeError: If layers of a kind differ, so that no total can be computed from them.
    """
    published = list(configuration(name).layer_types)
    result: dict[tuple[str, str], Part] = {}
    for place, counted in counts.items():
        kind = ONCE if place.layer is None else KINDS[place.layer]
        part = Part(kind, place.part, 1 if kind == ONCE else published.count(kind), counted)
        if (first := result.setdefault((kind, place.part), part)).counts.launches != counted.launches:
            more, fewer = counted.launches - first.counts.launches, first.counts.launches - counted.launches
            raise RuntimeError(f"layer {place.layer} of {name}: {place.part}: {more} more and {fewer} fewer launches")
    return list(result.values())


def count(name: str, what: str, batch: int, enabled: bool, tokens: int = PREFILL_TOKENS) -> list[Part]:
    """Returns the parts of a decode step, or of a prefill of `tokens` tokens in all."""
    from torch_gdn.integrations import transformers

    if enabled:
        transformers.enable()
    try:
        model = small_model(name, torch.bfloat16).to("mps")
        prompt = PROMPT if what == DECODE else tokens // batch
        with torch.no_grad():
            counted = steps(model, batch, prompt)
    finally:
        transformers.disable()
    return parts_of(name, counted[DECODED - 2 if what == DECODE else 0])


def total(parts: Sequence[Part]) -> int:
    return sum(part.layers * part.counts.total for part in parts)


def jobs(quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """Yields model, what to count, batch, and tokens of a prefill."""
    for name in MODELS:
        for what in (DECODE, PREFILL):
            for batch in (1, 8):
                yield name, what, batch, QUICK_TOKENS if quick else PREFILL_TOKENS
        if name in drafted_launches.MODELS:
            yield name, DRAFTS, 1, PROMPT


def run(name: str, what: str, batch: int, tokens: int, ceilings: object, seconds: float) -> list[Row]:
    """Returns rows. `ceilings` and `seconds` are arguments of the sections that time."""
    if on_simulated_device():
        import mps_simulator

        mps_simulator.activate()
    if what == DRAFTS:
        return with_drafts(name)
    rows = []
    case = f"{name}, {what}, batch {batch}"
    for contender in (TRANSFORMERS, OURS):
        parts = count(name, what, batch, contender == OURS, tokens)
        counts = {str(part): part.counts.total for part in parts} | {TOTAL: total(parts)} | sums(parts)
        rows.append(Row("launches", case, "bfloat16", batch, contender, 0, counts=counts))
    if what == DECODE and on_simulated_device():
        rows.append(Row("launches", case, "bfloat16", batch, COMPILED, 0, counts=compiled.count(name, batch)))
    return rows


def with_drafts(name: str) -> list[Row]:
    rows = []
    for column, drafts, accepted in drafted_launches.cases():
        parts = parts_of(name, drafted_launches.count(name, drafts, accepted))
        counts = {str(part): part.counts.total for part in parts} | {TOTAL: total(parts)} | sums(parts)
        rows.append(Row("launches", f"{name}, {DRAFTS}", "bfloat16", 1, column, 0, counts=counts))
    return rows


def sums(parts: Sequence[Part]) -> dict[str, int]:
    """Sums copies, waits and bytes over the published number of layers."""
    added: Counter[str] = Counter()
    for part in parts:
        for way, copies in part.counts.copies.items():
            added[f"copies {way}"] += part.layers * copies
        added["waits"] += part.layers * sum(part.counts.waits.values())
        added["bytes"] += part.layers * part.counts.bytes
    return dict(added)


def tables(rows: Sequence[Row]) -> list[str]:
    """Returns Markdown tables, one per case, with the launches of each part and contender, per layer."""
    cases: dict[str, dict[str, dict[str, int]]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.contender] = row.counts
    result = []
    for case, counts in cases.items():
        names = list(dict.fromkeys(name for each in counts.values() for name in each))
        lines = [[name, *(f"{each.get(name, 0):,}" for each in counts.values())] for name in names]
        result += ["", markdown([case, *counts], lines)]
    return result
