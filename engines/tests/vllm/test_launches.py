"""Counts what a step of vLLM's engine launches on mps, with published heads and four small layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import launches
from engines.tests.vllm.conftest import run_engine

ONCE = {
    "copy_from_host": 6,  # the block tables, and five arrays of vLLM's runner
    "fill_": 2,
    "to": 3,
    "add": 2,
    "copy_": 2,
    "index": 2,
    "sub": 1,
    "compute_slot_mapping": 1,
    "embedding": 1,
    "rms_norm": 1,
    "linear": 1,
    "argmax": 1,
    "index_select": 1,  # the angles, which the first attention layer looks up
}
NORMS = {"rms_norm": 2}
LINEAR = {"linear": 3, "causal_conv1d_update": 1, "gdn_decode": 1}
ATTENTION = {"linear": 2, "qk_norm_rope_and_cache": 1, "act_and_mul": 1}
FULL = {**ATTENTION, "paged_attention_decode": 1}
PREFILL = {**ATTENTION, "paged_attention_prefill": 1}  # and the angles
CODES = {"linear": 2, "qk_norm_rope": 1, "aura_paged_tile_means": 1, "aura_encode": 2, "paged_rotate": 2}
CODES |= {"aura_paged_attention": 1, "reshape_and_cache": 1, "act_and_mul": 1}
EXPERTS = {"linear": 2, "moe_router": 1, "moe_gate_up": 1, "moe_down": 1}
DENSE = {"linear": 2, "act_and_mul": 1}
TOTALS = {"Qwen3.5-35B-A3B": (EXPERTS, 504), "Qwen3-Next-80B-A3B": (EXPERTS, 600), "Qwen3.5-0.8B": (DENSE, 264)}


def step_launches(step: list[list[Any]]) -> dict[str, Counter[str]]:
    """Returns the launches outside of layers, of a linear layer and of the attention layer; linear layers are alike."""
    result: dict[str, Counter[str]] = {"once": Counter()}
    for layer, _, counts, *_ in step:
        result.setdefault("once" if layer is None else str(layer), Counter()).update(counts)
    angles = Counter(index_select=result["3"].pop("index_select"))
    assert result["0"] == result["1"] == result["2"]
    return {"once": result["once"] + angles, "linear": result["0"], "full": result["3"]}


def steps_of(name: str, folder: Path, batches: tuple[int, ...], **options: Any) -> list[list[list[Any]]]:
    """Four steps of each batch: the prompt's, and three that decode."""
    model = launches.small_model(name, torch.bfloat16)
    model.config.eos_token_id = model.config.bos_token_id = 0
    model.save_pretrained(folder)
    rounds = [{"prompts": [list(range(1, 9))] * batch, "tokens": 4} for batch in batches]
    options = {"dtype": "bfloat16", "max_num_seqs": 16, **options}
    scenario = {"model": str(folder), "options": options, "rounds": rounds, "launches": True}
    result: list[list[list[Any]]] = run_engine("mps", scenario)["launches"]
    return result


def total_of(name: str, counts: dict[str, Counter[str]]) -> int:
    kinds = Counter(kind.split("_")[0] for kind in launches.configuration(name).layer_types)
    return counts["once"].total() + sum(n * counts[kind].total() for kind, n in kinds.items())


@pytest.mark.parametrize("name", TOTALS)
def test_a_step(name: str, tmp_path: Path) -> None:
    """A decode step launches the same for one sequence and for eight. It copies to the device once, and waits once.

    A prompt's attention layer launches as much as a token's.
    """
    mlp, total = TOTALS[name]
    steps = steps_of(name, tmp_path, (1, 8))
    for step in (steps[0], steps[4]):
        (attention,) = (counts for layer, part, counts, *_ in step if (layer, part) == (3, "attention"))
        assert attention == sums(PREFILL, {"index_select": 1})
    for step in (steps[2], steps[6]):
        result = step_launches(step)
        assert result == {"once": ONCE, "linear": sums(NORMS, LINEAR, mlp), "full": sums(NORMS, FULL, mlp)}
        assert sums(*(each[3] for each in step)) == {"to the device": 1, "to the host": 1}
        assert sum(sums(*(each[4] for each in step)).values()) == 1
    assert total_of(name, result) == total


def test_a_step_with_codes(tmp_path: Path) -> None:
    """With AURA, a step copies where each request's exact rows are. A layer finds means, and stores codes and an
    exact row."""
    name = "Qwen3.5-0.8B"
    steps = steps_of(name, tmp_path, (1,), additional_config={"aura": "8v4"})
    result = step_launches(steps[2])
    assert result["once"] == sums(ONCE, {"copy_from_host": 1})
    assert result["full"] == sums(NORMS, CODES, DENSE)
    assert total_of(name, result) == 301


def sums(*counts: dict[str, int]) -> Counter[str]:
    result: Counter[str] = Counter()
    for each in counts:
        result.update(each)
    return result
