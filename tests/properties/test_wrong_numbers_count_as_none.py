"""Tests that a wrong slot, checkpoint or expert is reported, and that the rest of the call is as if there were none."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.errors import assert_same_bits
from tests.properties.test_indices_at_their_limits import calls_of
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, to_device

# -1 in these is no slot, no checkpoint, or no expert.
NONE = ("state_indices", "checkpoint_indices", "slots", "slot_mapping", "topk_ids")
OFFSETS, COUNTS = "checkpoint_offsets", "num_accepted_tokens"
CASES = [  # the slots of caches are in every run, because those ops have no test of their own for them
    pytest.param(op, name, marks=[] if name in ("slots", "slot_mapping") else pytest.mark.sweep(6))
    for op, entry in REGISTRY.items()
    for name in (*NONE, OFFSETS, COUNTS)
    if name in entry.arguments and name not in entry.written
    if (op, name) != ("gdn_decode_", COUNTS)  # its convolution and its rule take different numbers for a wrong one
]


def wrong_numbers(call: Call, name: str) -> list[int]:
    """Returns numbers that the last place must not have: outside, just past the end, and those that are taken.

    A rule has checkpoints after whole chunks.
    """
    if name == OFFSETS:
        return [-64, 10**6, *([32] if "q" in call else [])]
    if name == COUNTS:
        return [-64, 0, 10**6]
    sizes = {
        "slots": ("norms", slice(2, 3)),
        "slot_mapping": ("key_cache", slice(2)),
        "topk_ids": ("w_gate_up" if "w_gate_up" in call else "w_down", slice(1)),
    }
    of, dimensions = sizes.get(name, ("state_pool", slice(1)))
    taken = {int(call[each].flatten()[0]) for each in {name, "state_indices"} if of == "state_pool"}
    return [call[of].shape[dimensions].numel(), 2**31, 2**32 + 1, *taken]


def with_last(call: Call, name: str, number: int) -> Call:
    numbers = call[name].long().clone()
    numbers.view(-1)[-1] = number
    return call | {name: numbers}


def without(call: Call, name: str, number: int) -> Call:
    """Returns the call in which the last place has none. A count of drafts becomes the nearest one that there is."""
    if name == COUNTS and call["state_indices"].dim() > 1:
        return with_last(call, name, min(max(number, 1), call["state_indices"].shape[1]))
    return with_last(call, {OFFSETS: "checkpoint_indices", COUNTS: "state_indices"}.get(name, name), -1)


@pytest.mark.parametrize(("op", "name"), CASES)
def test_a_wrong_number(device: torch.device, op: str, name: str) -> None:
    """The CPU refuses the call and writes nothing. On `mps` the next synchronisation raises the error, once."""
    entry = REGISTRY[op]
    calls = [(point, call) for point, call in calls_of(op) if name in call]
    for (point, call), number in [(each, number) for each in calls for number in wrong_numbers(each[1], name)]:
        on_device = to_device(with_last(call, name, number), device)
        message = rf"^{op}: {name}: expected .+, got {number}"
        if device.type == "cpu":
            with pytest.raises(ValueError, match=rf"{message}\b"):
                entry.run(on_device, point)
            expected = {each: call[each] for each in entry.written if each in call}
            result = {each: on_device[each] for each in expected}
        else:
            result = entry.outputs(on_device, entry.run(on_device, point))
            with pytest.raises(RuntimeError, match=rf"{message} at {call[name].numel() - 1}\b"):
                torch.mps.synchronize()
            torch.mps.synchronize()
            right = to_device(without(call, name, number), device)
            expected = entry.outputs(right, entry.run(right, point))
        for each, x in expected.items():
            assert_same_bits(f"{each} with {number}", result[each], x)
    assert calls
