"""Runs one kernel over a very long prompt. Before torch 2.15, a launch that the system ends raises no error."""

from __future__ import annotations

import torch

from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry import bounds
from torch_gdn_check.registry.cases import END_TO_END_OPS, Case, make_case
from torch_gdn_check.steps import Outcome, Skipped, judged, on_simulated_device

TOKENS = 1 << 17
DECAY = -1.0  # the log decay per token; 128 tokens reduce the state to 1e-55
END = 64


def last_tokens(case: Case, count: int) -> Case:
    tail = {name: getattr(case, name)[:, -count:].contiguous() for name in ("q", "k", "v", "g", "beta")}
    return Case(**tail)


def check_long_prompt(device: torch.device, algorithm: str, tokens: int = TOKENS) -> Outcome:
    """Checks the last tokens of the prompt, which the state reaches only through all others."""
    if on_simulated_device() and device.type == "mps":
        raise Skipped("the simulated device would take hours, and has no watchdog")
    case = make_case(tokens, 128, 128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    case.g = torch.full_like(case.g, DECAY)
    exact = last_tokens(case, END + 128).exact()[0][:, -END:]
    on_device = case.to(device)
    with prefill_algorithm(algorithm):
        o, _ = END_TO_END_OPS["chunk_gated_delta_rule"](*on_device.qkv, **on_device.options)
    return judged(bounds.compare("o", o[:, -END:].cpu(), exact, bounds.CHUNK_OUTPUT[torch.bfloat16]))
