"""Aligned prefix caching: which states move where, against the same written as loops over requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.helpers.errors import assert_same_bits
from torch_gdn_engines.vllm import state_copies
from torch_gdn_engines.vllm.state_copies import State

BLOCKS, COLUMNS, D, HV, V, K, BLOCK_SIZE = 40, 6, 10, 2, 3, 4, 16


def states_on(device: torch.device) -> list[State]:
    """Two layers, each with its pages in a storage of its own: columns of the convolution, the state, and room."""
    made = []
    for _ in range(2):
        pages = torch.randn(BLOCKS, COLUMNS * D + HV * V * K + 6).to(device)
        made.append(State(pages[:, : COLUMNS * D].view(BLOCKS, COLUMNS, D), True))
        made.append(State(pages[:, COLUMNS * D : COLUMNS * D + HV * V * K].view(BLOCKS, HV, V, K), False))
    return made


def move(rows: Tensor, is_convolution: bool, table: list[int], source: int, destination: int, bias: int) -> None:
    if is_convolution:
        rows[table[destination], : COLUMNS - bias] = rows[table[source], bias:].clone()
    else:
        rows[table[destination]] = rows[table[source + bias]].clone()


def tables_of(requests: int) -> Tensor:
    return (1 + torch.randperm(BLOCKS - 1)[: requests * 6]).view(requests, 6).int()


def compare(states: list[State], before: list[Tensor], table: Tensor, moves: list[tuple[int, int, int, int]]) -> None:
    for state, rows in zip(states, before, strict=True):
        for request, source, destination, bias in moves:
            move(rows, state.is_convolution, table[request].tolist(), source, destination, bias)
        assert_same_bits("states", state.rows, rows)


def test_before_a_step(device: torch.device) -> None:
    states, table = states_on(device), tables_of(5)
    before = [state.rows.cpu().clone() for state in states]
    context = SimpleNamespace(is_initialized=True, tables_and_states=[(table.to(device), states)])
    source, destination, bias = [0, -1, 2, 1, 3], [1, 2, 2, 3, 4], [2, 0, 1, 0, 1]  # the second is new, the third stays
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (destination, source, bias)]
    state_copies.copy_before_step(context, 5, *ints, None)
    moves = [(i, source[i], destination[i], bias[i]) for i in (0, 3, 4)]
    compare(states, before, table, moves)


def test_after_a_step(device: torch.device) -> None:
    """Tokens that the state has seen, drafts accepted: whether the last end of a block was passed."""
    states, table = states_on(device), tables_of(5)
    before = [state.rows.cpu().clone() for state in states]
    accepted, computed, drafts = [3, 1, 4, 2, 1], [14, 5, 29, 30, 15], [3, 3, 3, 3, 3]
    scheduled, source = [4, 4, 4, 4, 4], [1, 0, 1, 2, 0]
    moves, counts = [], list(accepted)
    for i in range(5):
        running = computed[i] + scheduled[i] - drafts[i]
        end = (running + accepted[i] - 1) // BLOCK_SIZE * BLOCK_SIZE
        if end < running:
            continue
        destination = end // BLOCK_SIZE - 1
        if source[i] == destination:
            counts[i] = 1
            if end == running:
                continue
        moves.append((i, source[i], destination, end - running))
    assert len(moves) == 3 and counts != accepted  # the cases that there are
    context = SimpleNamespace(
        is_initialized=True,
        block_size=BLOCK_SIZE,
        tables_and_states=[(table.to(device), states)],
        num_accepted_tokens_out=torch.zeros(8, dtype=torch.int32, device=device),
    )
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (accepted, source, scheduled, computed, drafts)]
    state_copies.copy_after_step(context, 5, *ints)
    compare(states, before, table, moves)
    assert context.num_accepted_tokens_out.tolist() == counts + [0] * 3


def test_nothing_is_copied_before_there_are_pools() -> None:
    context = SimpleNamespace(is_initialized=False)
    nothing = torch.zeros(1, dtype=torch.int32)
    state_copies.copy_before_step(context, 1, nothing, nothing, nothing, None)
    state_copies.copy_after_step(context, 1, *[nothing] * 5)


def test_model_runner_v2_is_refused() -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="expected vLLM's model runner V1, got V2"):
        state_copies.copy_before_step(SimpleNamespace(), 1, nothing, nothing, nothing, nothing)
