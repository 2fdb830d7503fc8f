"""Tests checkpoints of the convolution: its columns after some of a sequence's tokens, in a separate slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_gdn
from tests.gdn.test_opcheck import opcheck
from tests.helpers.devices import ready
from tests.helpers.errors import assert_same_bits
from torch_gdn import reference

D, W, SLOTS = 12, 4, 12


def random_pool(S: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SLOTS, D, S, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("S", [3, 4, 11])
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_are_the_columns_after_those_tokens(
    device: torch.device, tokens: int, channels_first: bool, S: int, dtype: torch.dtype
) -> None:
    """Checkpoints are after the first token, after all, after none, and in a sequence that starts from zeros."""
    x, weight = torch.randn(4, tokens, D).to(dtype), torch.randn(D, W).to(dtype)
    if channels_first:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    pool = random_pool(S, dtype)
    numbers: dict[str, Any] = {
        "state_indices": torch.tensor([5, 3, 8, 1]),
        "has_initial_state": torch.tensor([True, True, True, False]),
        "checkpoint_offsets": torch.tensor([1, tokens, 0, (tokens + 1) // 2]),
        "checkpoint_indices": torch.tensor([7, 2, 4, 9]),
    }
    expected, on_device = pool.clone(), pool.to(device, copy=True)
    reference.causal_conv1d_update_(x, weight, expected, **numbers)
    numbers = {name: value.to(device) for name, value in numbers.items()}
    y = torch_gdn.causal_conv1d_update_(x.to(device), weight.to(device), on_device, **numbers)
    assert_same_bits("pool", on_device, expected)
    assert not torch.equal(on_device[9].cpu(), pool[9])
    plain = {name: numbers[name] for name in ("state_indices", "has_initial_state")}
    same = torch_gdn.causal_conv1d_update_(x.to(device), weight.to(device), pool.to(device, copy=True), **plain)
    torch.testing.assert_close(y, same)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_packed_sequences(device: torch.device, on_cpu: bool) -> None:
    """There is a null slot, an empty sequence, and one without a slot."""
    x, weight, pool = torch.randn(1, 50, D), torch.randn(D, W), random_pool(4)
    numbers = {
        "cu_seqlens": torch.tensor([0, 20, 20, 40, 50], dtype=torch.int32),
        "state_indices": torch.tensor([5, 3, 0, 1], dtype=torch.int32),
        "checkpoint_offsets": torch.tensor([17, 0, 3, 5], dtype=torch.int32),
        "checkpoint_indices": torch.tensor([7, 2, 4, 0], dtype=torch.int32),
    }
    expected, on_device = pool.clone(), pool.to(device, copy=True)
    reference.causal_conv1d_update_(x, weight, expected, null_index=0, **numbers)
    numbers = {name: value.to("cpu" if on_cpu else device) for name, value in numbers.items()}
    torch_gdn.causal_conv1d_update_(x.to(device), weight.to(device), on_device, null_index=0, **numbers)
    assert_same_bits("pool", on_device, expected)


WRONG = [
    ("checkpoint_offsets", "expected multiples of .+ up to the tokens of a sequence", [0, 7], [4, 5]),
    ("checkpoint_offsets", "expected multiples of .+ up to the tokens of a sequence", [-1, 0], [4, 5]),
    ("checkpoint_indices", "expected indices below the number of slots", [6, 6], [4, SLOTS]),
    ("checkpoint_indices", "expected each slot at most once", [6, 6], [4, 4]),
    ("checkpoint_indices", "expected each slot at most once", [6, 6], [4, 0]),
]


@pytest.mark.parametrize(("argument", "words", "offsets", "slots"), WRONG)
def test_wrong_numbers_on_the_device(argument: str, words: str, offsets: list[int], slots: list[int]) -> None:
    """The next synchronisation raises, and a wrong checkpoint is not written."""
    device = ready("mps")
    x, weight, pool = torch.randn(2, 6, D).to(device), torch.randn(D, W).to(device), random_pool(4).to(device)
    expected = pool.clone()
    torch_gdn.causal_conv1d_update_(x, weight, expected)
    numbers = {"checkpoint_offsets": torch.tensor(offsets), "checkpoint_indices": torch.tensor(slots)}
    torch_gdn.causal_conv1d_update_(x, weight, pool, **{name: value.to(device) for name, value in numbers.items()})
    with pytest.raises(RuntimeError, match=rf"^causal_conv1d_update_: {argument}: {words}, got -?\d+ at [01]\b"):
        torch.mps.synchronize()
    others = [n for n in range(SLOTS) if n != 4]
    assert_same_bits("pool", pool[others], expected[others])


def test_opcheck(device: torch.device) -> None:
    call = {"x": torch.randn(2, 6, D), "weight": torch.randn(D, W), "state_pool": random_pool(4)}
    call |= {"checkpoint_offsets": torch.tensor([1, 6]), "checkpoint_indices": torch.tensor([4, 5])}
    opcheck("causal_conv1d_update_", {name: value.to(device) for name, value in call.items()}, device)
