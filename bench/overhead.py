"""Measures host overhead: microseconds from a Python call to its return, with next to nothing to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import torch_gdn
from bench.ceilings import Ceilings
from bench.modules import MODULES, module
from bench.results import OURS, Row
from bench.shapes import Layer
from bench.timing import Call, measure
from torch_gdn.aura import KVCache

PYTORCH = "torch.add, for comparison"
SIZE = 16  # K, V and channels of the tiny shapes
TINY = Layer("tiny", 1, 1, SIZE, SIZE)


def gdn_calls(device: torch.device) -> dict[str, Call]:
    q, k, v = (torch.randn(1, 1, 1, SIZE, device=device) for _ in range(3))
    g, beta = -torch.rand(1, 1, 1, device=device), torch.rand(1, 1, 1, device=device)
    pool = torch.zeros(1, 1, SIZE, SIZE, device=device)
    ops = torch.ops.gdn
    in_chunks, recurrent = torch_gdn.chunk_gated_delta_rule, torch_gdn.fused_recurrent_gated_delta_rule
    return {
        "chunk_gated_delta_rule": lambda: in_chunks(q, k, v, g, beta, initial_state=pool),
        "fused_recurrent_gated_delta_rule": lambda: recurrent(q, k, v, g=g, beta=beta, initial_state=pool),
        "fused_recurrent_gated_delta_rule_": lambda: torch_gdn.fused_recurrent_gated_delta_rule_(
            q, k, v, g=g, beta=beta, state_pool=pool
        ),
        "ops.chunk_gated_delta_rule": lambda: ops.chunk_gated_delta_rule(q, k, v, g, beta),
        "ops.fused_recurrent_gated_delta_rule_": lambda: ops.fused_recurrent_gated_delta_rule_(
            q, k, v, g, beta, state_pool=pool
        ),
        "l2norm": lambda: torch_gdn.l2norm(q),
    }


def module_calls(device: torch.device) -> dict[str, Call]:
    column, weight = torch.randn(1, SIZE, device=device), torch.randn(SIZE, 4, device=device)
    cache = torch.zeros(1, SIZE, 4, device=device)
    calls: dict[str, Call] = {name: module(name, TINY, 1, torch.float32, device).call for name in MODULES}
    return calls | {
        "causal_conv1d_update": lambda: torch_gdn.causal_conv1d_update(column, cache, weight=weight, activation="silu")
    }


def aura_calls(device: torch.device) -> dict[str, Call]:
    q, k = (torch.randn(1, 1, 1, 64, device=device) for _ in range(2))
    cache = KVCache("8v4", 1, 1, 64, 16, device=device, dtype=torch.float32)
    cache.append(k, k)
    growing = KVCache("8v4", 1, 1, 64, 16, device=device, dtype=torch.float32)

    def append() -> None:
        growing.crop(0)
        growing.append(k, k)

    return {"aura.KVCache.attend": lambda: cache.attend(q), "aura.KVCache.append": append}


GROUPS: dict[str, Callable[[torch.device], dict[str, Call]]] = {
    "gdn": gdn_calls,
    "modules": module_calls,
    "aura": aura_calls,
}


def jobs(quick: bool) -> Iterator[tuple[str]]:
    for group in GROUPS:
        yield (group,)


def run(group: str, ceilings: Ceilings, seconds: float) -> list[Row]:
    torch.manual_seed(0)
    device = ceilings.device
    calls = GROUPS[group](device)
    rows = []
    with torch.no_grad():
        anything: Tensor = torch.zeros(SIZE, device=device)
        times = measure(calls | {PYTORCH: lambda: anything + 1}, device, seconds / 2)
    for name, time in times.items():
        contender = "torch" if name == PYTORCH else OURS
        row = Row("overhead", name, "float32", 1, contender, torch.get_num_threads())
        row.time(time)
        rows.append(row)
    return rows
