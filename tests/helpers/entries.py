"""Changes calls of a registry entry and compares their results with float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from torch_gdn_check.registry import bounds
from torch_gdn_check.registry.gdn import ALGORITHMS, CHUNKED
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import OpEntry, Point

# Index tensors that may be on the CPU, whatever the op's device.
INDICES = {"cu_seqlens", "chunk_indices", "state_indices", "num_accepted_tokens", "block_table", "seq_lens"}
INDICES |= {"checkpoint_offsets", "checkpoint_indices", "source_offsets", "destination_offsets", "sizes"}
INDICES |= {"exact_slots", "exact_starts", "exact_sink_slots"}


def fields_of(entry: OpEntry[Any]) -> set[str]:
    """Returns the fields of the entry's points."""
    return {each.name for each in fields(entry.small)}


def algorithms_of(op: str) -> tuple[str, ...]:
    """Returns the algorithms of a prefill."""
    return CHUNKED if "kda" in op else ALGORITHMS


def assert_exact(entry: OpEntry[Any], point: Point, call: Call, device: torch.device, more: float = 0.0) -> None:
    """Asserts that the op's outputs and what it writes, for inputs on the CPU, are within its bounds of float64 +
    `more`.
    """
    on_device = to_device(call, device)
    result = entry.outputs(on_device, entry.run(on_device, point))
    if device.type == "mps":
        torch.mps.synchronize()
    parts = entry.compared(point, call, {name: x.cpu() for name, x in result.items()})
    part = bounds.worst(replace(each, bound=each.bound + more) for each in parts)
    assert part.kept, f"{entry.name} at {point.name}: {part}"
