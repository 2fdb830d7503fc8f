"""Compares every op with float64 at the points of its entry, on inputs from a seed."""

from __future__ import annotations

import torch

from torch_gdn_check.registry import REGISTRY, Point
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.steps import Outcome, judged


def check_point(device: torch.device, op: str, point: Point) -> Outcome:
    entry = REGISTRY[op]
    call = entry.call(point)
    on_device = to_device(call, device)
    result = entry.outputs(on_device, entry.run(on_device, point))
    return judged(entry.compared(point, call, result))
