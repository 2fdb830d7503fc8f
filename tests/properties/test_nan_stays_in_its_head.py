"""Tests that NaN or infinity in a head of a sequence reaches no other head, sequence or earlier chunk of a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.entries import algorithms_of
from tests.helpers.errors import assert_same_bits
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import Named

RULES = [op for op, entry in REGISTRY.items() if "use_gate_in_kernel" in entry.arguments and not entry.written]
CASES = [(op, each) for op in RULES for each in (algorithms_of(op) if op.startswith("chunk") else (None,))]
BOUNDARIES = (0, 70, 210, 230)
TOKEN, HEAD, BEFORE = 70 + 64 + 5, 1, 70 + 64  # the second chunk of sequence 1, and where it begins


@pytest.mark.sweep(6)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_another_head_sequence_or_chunk(
    device: torch.device, op: str, algorithm: str | None, name: str, value: float
) -> None:
    entry = REGISTRY[op]
    point = replace(entry.small, K=32, V=32, tokens=BOUNDARIES[-1], boundaries=BOUNDARIES, algorithm=algorithm)
    clean = entry.call(replace(point, chunk_size=64))
    poisoned = clean | {name: clean[name].clone()}
    poisoned[name][(1, HEAD, 3, 4) if name == "initial_state" else (0, TOKEN, HEAD)] = value

    def outputs(call: Call) -> Named:
        on_device = to_device(call, device)
        return entry.outputs(on_device, entry.run(on_device, point))

    touched = [2, 3] if name in ("q", "k") else [HEAD]  # the value heads of the key head, or one
    others = [head for head in range(4) if head not in touched]
    expected, result = outputs(clean), outputs(poisoned)
    o, state, clean_o, clean_state = *result.values(), *expected.values()
    assert not o[:, TOKEN:210, touched].isfinite().all()
    assert_same_bits("o of other heads", o[:, :, others], clean_o[:, :, others])
    assert_same_bits("o of the sequence before", o[:, :70], clean_o[:, :70])
    assert_same_bits("o of the sequence after", o[:, 210:], clean_o[:, 210:])
    assert_same_bits("state of other heads", state[:, others], clean_state[:, others])
    assert_same_bits("state of other sequences", state[[0, 2]], clean_state[[0, 2]])
    if name != "initial_state":
        assert_same_bits("o of the chunk before", o[:, 70:BEFORE], clean_o[:, 70:BEFORE])
