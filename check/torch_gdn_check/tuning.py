"""Measures the fastest prefill algorithm as `python -m torch_gdn tune` does, but stores nothing."""

from __future__ import annotations

from dataclasses import asdict

import torch

from torch_gdn.tools import tune
from torch_gdn_check.steps import Outcome
from torch_gdn_check.timing import refuse_simulated


def check_tuning(device: torch.device, sizes: tuple[int, int, int, int], tokens: int) -> Outcome:
    refuse_simulated(device)
    return Outcome(asdict(tune.measure(sizes, tokens, 1, torch.bfloat16, repeats=3, device=device)))
