"""Tests evidence.lab.studies.prefill_choice: it derives the counts of other lengths and heads from two, and judges
made-up cases.
"""

from __future__ import annotations

import pytest
import torch

from bench.shapes import Layer
from evidence.lab.studies import metal_model, prefill_choice
from evidence.lab.studies.metal_model import Code
from evidence.lab.studies.prefill_choice import ALGORITHMS, CHUNK, Case, Thresholds
from tests.helpers.devices import on_a_mac

SMALL = Layer("small", 1, 2, 32, 32)
TAKEN = ("bank_cycles", "barriers", "collectives", "load_rounds", "matrix_multiplies", "threads", "threadgroups")
TAKEN += ("device_accesses", "threadgroup_accesses", "dispatches", "threadgroup_memory")
TAKEN += ("device_bytes_distinct_read", "device_bytes_issued_read", "device_bytes_issued_written")


def float_operations(counts: prefill_choice.Counts) -> float:
    return sum(of.operations_issued.get(kind, 0) for of in counts.values() for kind in ("fma", "add", "mul"))


def counts_of(counts: prefill_choice.Counts) -> dict[str, dict[str, object]]:
    return {name: {key: getattr(of, key) for key in TAKEN} for name, of in counts.items()}


@pytest.mark.skipif(on_a_mac(), reason="this machine has a Metal device of its own, which does not count")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("workload", prefill_choice.OPS)
def test_longer_prompts_and_more_heads_are_counted_from_short_ones(
    monkeypatch: pytest.MonkeyPatch, workload: str, algorithm: str
) -> None:
    import mps_simulator

    mps_simulator.activate()
    monkeypatch.setattr(metal_model, "estimated_code", lambda variant: Code())

    def counted(layer: Layer, tokens: int) -> prefill_choice.Counts:
        torch.manual_seed(0)
        with torch.no_grad():
            return prefill_choice.count(workload, layer, tokens, algorithm)[0]

    one, two = counted(SMALL, CHUNK), counted(SMALL, 2 * CHUNK)
    for derived, direct in (
        (prefill_choice.for_chunks(one, two, 3), counted(SMALL, 3 * CHUNK)),
        (prefill_choice.for_heads(two, 3), counted(SMALL._replace(H=3, HV=6), 2 * CHUNK)),
    ):
        assert counts_of(derived) == counts_of(direct)
        # the data decide which branch a decay takes
        assert float_operations(derived) == pytest.approx(float_operations(direct), rel=0.05)


def case(tokens: int, share: float, chosen: str, *seconds: float) -> Case:
    return Case(tokens, share, chosen, dict(zip(ALGORITHMS, seconds, strict=True)))


CASES = [
    case(4, 1, "recurrent", 9, 3, 2),
    case(5, 1, "recurrent", 9, 2, 3),  # 1.5 times the best
    case(256, 0.5, "fused_chunk", 5, 4, 9),
    case(320, 0.5, "fused_chunk", 4, 4.001, 9),  # this loses nothing
    case(448, 0.5, "chunked", 4, 5, 9),
    case(448, 2, "chunked", 5, 4, 9),  # 1.25 times
]


def test_the_best_thresholds_lose_least() -> None:
    best = prefill_choice.best_thresholds(CASES)
    assert (best.fused_from, best.most_share) == (5, 0.5) and best.chunked_from == 320
    assert [best.choose(each) for each in CASES] == ["recurrent", *["fused_chunk"] * 2, *["chunked"] * 2, "fused_chunk"]
    assert prefill_choice.loss(CASES, best.choose) == (1, 1)


def test_what_the_heuristic_loses() -> None:
    average, most = prefill_choice.loss(CASES, lambda each: each.chosen)
    assert average == pytest.approx((1.5 * 1.25 * 1.00025) ** (1 / 6)) and most == 1.5
    assert Thresholds(5, 320, 0.5).choose(case(320, 0.6, "", 1, 1, 1)) == "fused_chunk"


def test_the_table_names_what_is_ahead() -> None:
    assert prefill_choice.cases_table(CASES).splitlines()[2:] == [
        "| 2 to 4 | 0.5 to 1 | recurrent | 1 |  |",
        "| 5 to 6 | 0.5 to 1 | recurrent | 1 | fused_chunk in 1, by up to 50.0 % |",
        "| 256 to 320 | 0 to 0.5 | fused_chunk | 2 |  |",
        "| 384 to 1024 | 0 to 0.5 | chunked | 1 |  |",
        "| 384 to 1024 | 1.6 to 4 | chunked | 1 | fused_chunk in 1, by up to 25.0 % |",
    ]
