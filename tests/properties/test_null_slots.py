"""Tests every op that has slots with indices of which some are null: at the start or end of a row, and with offsets of
zero next to indices that are in use or past the pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gdn.test_gdn_decode import in_three_ops
from tests.helpers.devices import ready
from tests.helpers.entries import assert_exact, fields_of
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.variations import plans, some
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.models import DTYPES
from torch_gdn_check.registry.registry import OpEntry

SLOTTED = [op for op, entry in REGISTRY.items() if "state_indices" in entry.arguments]
STEPPED = [
    op for op in SLOTTED if "num_accepted_tokens" in REGISTRY[op].arguments and "W" not in fields_of(REGISTRY[op])
]
KEEPING = [op for op in SLOTTED if "checkpoint_indices" in REGISTRY[op].arguments]
OF_TOKENS = ("q", "k", "v", "g", "beta")  # arguments with a dimension of tokens
OF_SLOTS = ("state_pool", "has_initial_state", "num_accepted_tokens")
# the tokens, of a row's three, that have no slot
PATTERNS = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), ())
BOUND = 1e-6


def rows(null: int) -> Tensor:
    """Returns [N, 3]: rows with each pattern of null columns, and slots in random order."""
    indices = 1 + torch.randperm(3 * len(PATTERNS)).view(-1, 3)
    for row, columns in zip(indices, PATTERNS, strict=True):
        row[list(columns)] = null
    return indices


def step_of(entry: OpEntry[Any], null: int, accepted: int) -> Call:
    """Runs a step of three tokens for all rows."""
    indices = rows(null)
    N = len(indices)
    call = entry.call(replace(entry.small, batch=N, tokens=3))
    pool = call["state_pool"]
    call["state_pool"] = torch.randn(3 * len(PATTERNS) + 1, *pool.shape[1:])
    call |= {"state_indices": indices, "has_initial_state": torch.arange(N) % 4 != 3, "null_index": max(null, -1)}
    return call | {"num_accepted_tokens": torch.full((N,), accepted)}


def token_by_token(entry: OpEntry[Any], call: Call) -> tuple[Tensor, Tensor]:
    """Returns o and the pool in float64. Each token is a separate call on a pool of one slot."""
    wide = {name: doubled(x) for name, x in call.items()}
    pool, indices, null = wide["state_pool"].clone(), call["state_indices"], call["null_index"]
    o = torch.zeros_like(wide["v"])
    one = {"state_indices": torch.tensor([0]), "has_initial_state": torch.tensor([True]), "null_index": -1}
    for n, (row, accepted) in enumerate(zip(indices.tolist(), call["num_accepted_tokens"].tolist(), strict=True)):
        start = row[accepted - 1]
        if start <= null:
            continue
        state = wide["state_pool"][start : start + 1] * call["has_initial_state"][n]
        for t, slot in enumerate(row):
            token = {name: wide[name][n : n + 1, t : t + 1] for name in OF_TOKENS}
            o[n, t] = entry.exact(token | one | {"state_pool": state})[0, 0]
            if slot > null:
                pool[slot] = state[0]
    return o, pool


@pytest.mark.parametrize("null", [-1, 0, -7])
@pytest.mark.parametrize("op", STEPPED)
def test_rows_that_are_partly_null(device: torch.device, op: str, null: int) -> None:
    """The column from which a step continues decides if a row is computed. The other columns decide if a state is
    stored. Threadgroups search 24 indices, and a separate kernel searches more than 32.
    """
    entry = REGISTRY[op]
    for accepted in (1, 2, 3):
        call = step_of(entry, null, accepted)
        call = twice(call) if accepted == 2 else call
        o, pool = token_by_token(entry, call)
        on_device = to_device(call, device)
        result = entry.run(on_device)
        if device.type == "mps":
            torch.mps.synchronize()
        absent = [n for n, row in enumerate(call["state_indices"].tolist()) if row[accepted - 1] <= call["null_index"]]
        assert absent and (result[absent] == 0).all()
        assert_close("o", result, o, BOUND)
        assert_close("state_pool", on_device["state_pool"], pool, BOUND, head_dim=1)
        untouched = [s for s in range(len(pool)) if torch.equal(pool[s], call["state_pool"][s].double())]
        assert_same_bits("other slots", on_device["state_pool"][untouched], call["state_pool"][untouched])


@pytest.mark.parametrize("op", [*STEPPED, "gdn_decode_"])
def test_a_count_of_more_columns_than_there_are_is_reported(op: str) -> None:
    """A call with one head and one block of values has one threadgroup per sequence, which reports the error."""
    entry, device = REGISTRY[op], ready("mps")
    for columns, wrong in ((1, 2), (2, 3), (2, 0)):
        call = entry.call(replace(entry.small, K=16, V=8, H=1, HV=1, batch=2, tokens=1))
        call |= {"state_indices": torch.arange(1, 2 * columns + 1).view(2, columns)}
        call |= {"num_accepted_tokens": torch.tensor([1, wrong])}
        on_device = to_device(call, device)
        entry.run(on_device)
        with pytest.raises(RuntimeError, match=rf"^{op}: num_accepted_tokens: expected counts .*, got {wrong} at 1"):
            torch.mps.synchronize()
        assert_same_bits("a slot of no sequence", on_device["state_pool"][0], call["state_pool"][0])


def twice(call: Call) -> Call:
    """Doubles the sequences. The second half uses a second half of the pool."""
    slots, indices = len(call["state_pool"]), call["state_indices"]
    more = indices.where(indices <= call["null_index"], indices + slots)
    both = {name: torch.cat([call[name], call[name].flip(0)]) for name in OF_TOKENS}
    both |= {name: call[name].repeat(2, *[1] * (call[name].dim() - 1)) for name in OF_SLOTS}
    return call | both | {"state_indices": torch.cat([indices, more])}


@pytest.mark.parametrize("op", SLOTTED)
def test_every_number_at_and_below_null_index_is_null(device: torch.device, op: str) -> None:
    """Null indices are -1, 0 and far below, at the first, last and middle places. No sequence has the pool's slot 0.
    Tokens without a slot may be NaN, as may the padding of a server's batch. States have any dtype.
    """
    entry = REGISTRY[op]
    for plan in dict.fromkeys(replace(each, dtype=torch.float32) for each in plans(op)):
        of_states = {name: some(DTYPES, 1, op, plan.name)[0] for name in {"pool", "state"} & fields_of(entry)}
        heads = {"H": 1, "HV": 2, "tokens": 9} if "HV" in fields_of(entry) else {}
        point = replace(plan, batch=6, **heads, **of_states)
        call = entry.call(point) | {"state_indices": torch.tensor([-1, 4, -1, 2, -1, -1])}
        call["has_initial_state"] = torch.tensor([True, True, False, False, True, True])
        assert_exact(entry, point, call, device)
        others = call | {"state_indices": torch.tensor([0, 4, -1, 2, -(2**40), 0]), "null_index": 0}
        for name in call.keys() & {*OF_TOKENS, "x", "qkv"}:
            others[name] = call[name].index_fill(0, torch.tensor([0, 2, 4, 5]), torch.nan)
        on_device = [to_device(each, device) for each in (others, call)]
        for result, expected in zip(*(entry.outputs(x, entry.run(x, point)).values() for x in on_device), strict=True):
            assert_same_bits(op, result, expected)


@pytest.mark.parametrize("op", KEEPING)
def test_what_a_checkpoint_of_no_tokens_points_at_is_not_looked_at(device: torch.device, op: str) -> None:
    """The index is past the pool, a state's slot, another checkpoint's or null. Other checkpoints are stored."""
    entry = REGISTRY[op]
    tokens = 64
    call = entry.call(replace(entry.small, batch=6, tokens=tokens))
    call["state_pool"] = torch.cat([call["state_pool"], torch.randn_like(call["state_pool"])])
    call |= {"state_indices": torch.tensor([1, 2, 3, 4, -1, 6]), "has_initial_state": torch.ones(6, dtype=torch.bool)}
    offsets, slots = [0, tokens, 0, 0, 0, tokens], [2**40, 0, 3, 7, 2, 7]
    checkpoints = {"checkpoint_offsets": torch.tensor(offsets), "checkpoint_indices": torch.tensor(slots)}
    plain, kept = to_device(call, device), to_device(call | checkpoints, device)
    expected = entry.outputs(plain, entry.run(plain))
    expected["state_pool"][[0, 7]] = expected["state_pool"][[2, 6]]  # a checkpoint after all tokens is the final state
    result = entry.outputs(kept, entry.run(kept))
    if device.type == "mps":
        torch.mps.synchronize()
    for name, x in result.items():
        assert_same_bits(name, x, expected[name])


@pytest.mark.parametrize("null", [-1, 0])
def test_rows_of_a_layer_that_are_partly_null(device: torch.device, null: int) -> None:
    """A layer's step has the bits of its three ops. The convolution gets the first column as its slots."""
    entry = REGISTRY["gdn_decode_"]
    for accepted in (1, 2, 3):
        indices = rows(null)
        call = entry.call(replace(entry.small, batch=len(indices), tokens=3, W=4)) | {"null_index": null}
        call |= {"state_pool": torch.randn(3 * len(PATTERNS) + 1, *call["state_pool"].shape[1:])}
        call |= {"conv_pool": torch.randn(len(call["state_pool"]), call["conv_weight"].shape[0], 6)}
        call |= {"state_indices": indices, "has_initial_state": torch.arange(len(indices)) % 4 != 3}
        call |= {"num_accepted_tokens": torch.full((len(indices),), accepted), "allow_neg_eigval": True}
        call |= {"norm_activation": "silu", "norm_eps": 1e-6, "round_norm": False}
        one, three = to_device(call, device), to_device(call, device)
        o, expected = entry.run(one), in_three_ops(three)
        assert_same_bits("state_pool", one["state_pool"], three["state_pool"])
        assert_same_bits("conv_pool", one["conv_pool"], three["conv_pool"])
        assert_close("o", o.cpu(), expected.cpu().double(), 1e-6)
        absent = [n for n, row in enumerate(indices.tolist()) if row[accepted - 1] <= null]
        assert absent and (o[absent] == 0).all()
