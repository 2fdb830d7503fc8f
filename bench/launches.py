"""Counts what one decode step and one prefill of 512 tokens of a published model launch on `mps`, by part of the model.

`launch_counter` counts within `generate`, with transformers' own code and with torch_gdn enabled, and `compiled` with a
compiled forward. The model has four layers of random weights (three Gated DeltaNet, one attention), small matrices, and
the published model's heads and number of chosen experts. A total is the sum of what happens once, and of each kind of
layer as often as the published model has it. Bytes are those of the small matrices.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.launch_counter import ONCE, Counts, LaunchCounter, Place, counting
from bench.results import OURS, Row, markdown
from torch_gdn.tools import fits
from torch_gdn_check.steps import on_simulated_device

THEIRS = "transformers"
COMPILED = f"{OURS}, torch.compile"
TOTAL = "launches in all"
DECODE, PREFILL = "decode", "prefill"
PREFILL_TOKENS, PROMPT, QUICK_TOKENS = 512, 8, 80
DECODED = 4  # tokens that generate makes; the last but one step is counted
KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
SMALL = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 1024}
NEVER = SMALL["vocab_size"]  # ends a sequence; a step includes the check for it, but no step is the last
SMALL_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
# The names are `fits`'s. Each model has the same configuration with other sizes.
SMALLEST = {"num_hidden_layers": 24, "linear_num_value_heads": 16, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-35B-A3B": ("Qwen3.5-35B-A3B", {}),
    "Qwen3-Next-80B-A3B": ("Qwen3-Next-80B-A3B", {}),
    "Qwen3.5-0.8B": ("Qwen3.5-9B", SMALLEST),
    "OLMo-Hybrid-7B": ("OLMo-Hybrid-7B", {}),
}


@dataclass(frozen=True)
class Part:
    """The counts of a part of one kind of layer, and how many such layers the published model has."""

    kind: str  # the layer's kind, or ONCE outside all layers
    name: str
    layers: int
    counts: Counts

    def __str__(self) -> str:
        return ONCE if self.kind == ONCE else f"{self.layers} {self.kind.split('_')[0]} layers: {self.name}"


def configuration(name: str) -> Any:
    """Returns the published model's configuration."""
    known, other = MODELS[name]
    return type(fits.configuration_of(known))(**other)


def small_model(name: str, dtype: torch.dtype, kinds: Sequence[str] = KINDS) -> Any:
    published = configuration(name)
    sizes = {**SMALL, **(SMALL_EXPERTS if hasattr(published, "num_experts") else {})}
    kept = {key: value for key, value in published.to_diff_dict().items() if key not in sizes}
    if getattr(published, "head_dim", None) is None:
        kept["head_dim"] = published.hidden_size // published.num_attention_heads
    few = {"num_hidden_layers": len(kinds), "layer_types": list(kinds), "pad_token_id": 0, "eos_token_id": NEVER}
    small = type(published)(**{**kept, **sizes, **few})
    torch.manual_seed(0)
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    return auto.from_config(small, dtype=dtype).eval()


def steps(model: Any, batch: int, prompt: int) -> list[dict[Place, Counts]]:
    """Returns the counts of each step of `generate`, from the start of one forward to the start of the next."""
    ids = torch.randint(1, SMALL["vocab_size"], (batch, prompt)).to(model.device)
    mask = torch.ones_like(ids)
    found: list[dict[Place, Counts]] = [{}]

    def start() -> None:
        found.append({})
        counter.counts = found[-1]

    counter: LaunchCounter
    with counting(model, start) as counter:
        model.generate(ids, attention_mask=mask, max_new_tokens=DECODED, do_sample=False)
    return found[1:]


def parts_of(name: str, counts: dict[Place, Counts]) -> list[Part]:
    """Merges the layers of each kind.

    Raises: RuntimeError: If layers of a kind differ, so that no total can be computed from them.
    """
    published = list(configuration(name).layer_types)
    found: dict[tuple[str, str], Part] = {}
    for place, counted in counts.items():
        kind = ONCE if place.layer is None else KINDS[place.layer]
        part = Part(kind, place.part, 1 if kind == ONCE else published.count(kind), counted)
        if (first := found.setdefault((kind, place.part), part)).counts.launches != counted.launches:
            more, fewer = counted.launches - first.counts.launches, first.counts.launches - counted.launches
            raise RuntimeError(f"layer {place.layer} of {name}: {place.part}: {more} more and {fewer} fewer launches")
    return list(found.values())


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


def run(name: str, what: str, batch: int, tokens: int, ceilings: object, seconds: float) -> list[Row]:
    """Returns rows. `ceilings` and `seconds` are arguments of the sections that time."""
    if on_simulated_device():
        import mps_simulator

        mps_simulator.activate()
    rows = []
    case = f"{name}, {what}, batch {batch}"
    for contender in (THEIRS, OURS):
        parts = count(name, what, batch, contender == OURS, tokens)
        counts = {str(part): part.counts.total for part in parts} | {TOTAL: total(parts)} | sums(parts)
        rows.append(Row("launches", case, "bfloat16", batch, contender, 0, counts=counts))
    if what == DECODE and on_simulated_device():
        from bench import compiled  # it imports this module

        rows.append(Row("launches", case, "bfloat16", batch, COMPILED, 0, counts=compiled.count(name, batch)))
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
    found = []
    for case, counts in cases.items():
        names = list(dict.fromkeys(name for each in counts.values() for name in each))
        lines = [[name, *(f"{each.get(name, 0):,}" for each in counts.values())] for name in names]
        found += ["", markdown([case, *counts], lines)]
    return found
