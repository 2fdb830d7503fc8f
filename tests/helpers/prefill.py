"""The prefill algorithms that tests run on, and the kernels of each.

A plain `device` has the default algorithms: on `mps` the heuristic picks one. Tests of the prefill's mathematics or
kernels also name the algorithms that they run on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.devices import DEVICES
from torch_gdn import _C
from torch_gdn_check.registry.cases import END_TO_END_OPS, Case

PREFILL = "chunk_gated_delta_rule"
ALGORITHMS = {
    "chunked": ("chunk_fwd_intra", "chunk_fwd_h", "chunk_fwd_o"),
    "fused_chunk": ("fused_chunk_gated_delta_rule",),
    "recurrent": ("fused_recurrent_gated_delta_rule",),
}


def each_device(*algorithms: str) -> pytest.MarkDecorator:
    """Parametrizes `device` with every device, and `mps` again with each of these algorithms forced."""
    return pytest.mark.parametrize("device", [*DEVICES, *forced(algorithms)], indirect=True)


def on_mps(*algorithms: str) -> pytest.MarkDecorator:
    """Parametrizes `device` with `mps`, and with each of these algorithms forced."""
    return pytest.mark.parametrize("device", ["mps", *forced(algorithms)], indirect=True)


def each_op(*algorithms: str, devices: tuple[str, ...] = DEVICES) -> pytest.MarkDecorator:
    """Parametrizes `device` and `op` with both end-to-end ops on these devices, and the prefill on `mps` by these
    algorithms.
    """
    calls = [(device, op) for op in END_TO_END_OPS for device in devices]
    calls += [(device, PREFILL) for device in forced(algorithms)]
    return pytest.mark.parametrize(("device", "op"), calls, indirect=["device"], ids=["-".join(call) for call in calls])


def forced(algorithms: tuple[str, ...]) -> list[str]:
    """Returns parameters for the fixture `device`."""
    return [f"mps-{algorithm}" for algorithm in algorithms]


def kernels_of(op: str, case: Case, device: torch.device, **options: Any) -> tuple[str, ...]:
    """Returns the kernels that a call of an end-to-end op launches on `mps`."""
    if device.type != "mps" or not case.q.numel():
        return ()
    if op != PREFILL:
        return ALGORITHMS["recurrent"]
    if options.get("return_intermediate_states"):  # only the chunked algorithm stores them
        return ALGORITHMS["chunked"]
    return ALGORITHMS[algorithm_of(case)]


def algorithm_of(case: Case) -> str:
    """Returns the forced algorithm, or else the heuristic's for the mean length of the sequences."""
    B, T, HV, V = case.v.shape
    sequences = B if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    tokens = T if case.cu_seqlens is None else -(-T // sequences)
    return algorithm_at(tokens, sequences * HV, case.q.shape[3], V)


def algorithm_at(tokens: int, heads: int, K: int, V: int, channel_decays: bool = False) -> str:
    """Returns the algorithm for sequences of `tokens` tokens, with `heads` value heads in total."""
    facts = _C.device_facts()
    return _C.prefill_algorithm(tokens, heads, K, V, facts["name"], facts["core_count"], channel_decays)[0]
