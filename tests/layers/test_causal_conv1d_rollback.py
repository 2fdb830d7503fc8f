"""Tests speculative decoding with a convolution state that keeps the columns of each drafted token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, ready, with_unwritten_rows
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn_check.registry.bounds import ROUNDING

D, DRAFTS, SLOTS = 12, 4, 6


def history(pool: Tensor, slots: list[int], accepted: list[int], W: int) -> Tensor:
    """Returns [N, D, W - 1], the columns that the next token sees."""
    return torch.stack([pool[slot][:, a - 1 : a + W - 2] for slot, a in zip(slots, accepted, strict=True)])


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("W", [2, 3, 4])
def test_goes_on_after_what_was_accepted(device: torch.device, W: int, dtype: torch.dtype, channel_last: bool) -> None:
    """Outputs equal a plain convolution from column a - 1 of the history on. Then the columns and tokens follow."""
    S, slots, accepted = W - 2 + DRAFTS + 1, [4, 1, 3], [1, 3, 5]
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((3, DRAFTS, D), (D, W), (D,)))
    whole = torch.randn((SLOTS, S, D + 5) if channel_last else (SLOTS, D + 5, S)).to(dtype)
    pool = whole[..., :D].transpose(1, 2) if channel_last else whole[:, :D]
    past = history(pool, slots, accepted, W)
    exact, _ = reference.causal_conv1d(
        x.double(), weight.double(), bias.double(), initial_state=past.double(), activation="silu"
    )
    expected = whole.clone()
    view = expected[..., :D].transpose(1, 2) if channel_last else expected[:, :D]
    for n, slot in enumerate(slots):
        view[slot, :, : W - 2 + DRAFTS] = torch.cat([past[n, :, 1:], x[n].T], 1)
    on_device = whole.to(device)
    mine = on_device[..., :D].transpose(1, 2) if channel_last else on_device[:, :D]
    counts = torch.tensor(accepted, device=device, dtype=torch.int32)
    with kernels_run(device, "causal_conv1d_update"):
        y = torch_gdn.causal_conv1d_update_(
            x.to(device), weight.to(device), mine, torch.tensor(slots, device=device), bias=bias.to(device),
            activation="silu", num_accepted_tokens=counts,
        )  # fmt: skip
    assert_close("y", y, exact, ROUNDING[dtype], head_dim=2)
    assert_same_bits("pool and what lies between slots", on_device, expected)


def test_packed_sequences_with_padding(device: torch.device) -> None:
    """In over 16 tokens, sequences have different lengths. One is empty, one has no slot, and one has no past."""
    W, S, lengths = 4, 9, [7, 1, 0, 3, 7]
    boundaries = torch.tensor([0, 7, 8, 8, 11, 18])
    slots, accepted, has_past = [5, 2, 1, 0, 4], [7, 1, 2, 1, 3], [True, True, True, True, False]
    x, weight, pool = torch.randn(1, 18, D), torch.randn(D, W), torch.randn(SLOTS, D, S)
    expected, y = pool.clone(), torch.zeros(1, 18, D, dtype=torch.float64)
    for n, slot in enumerate(slots):
        tokens = x[:, boundaries[n] : boundaries[n + 1]]
        if slot == 0 or lengths[n] == 0:
            continue
        past = history(pool, [slot], [accepted[n]], W) if has_past[n] else torch.zeros(1, D, W - 1)
        y[:, boundaries[n] : boundaries[n + 1]], _ = reference.causal_conv1d(
            tokens.double(), weight.double(), initial_state=past.double()
        )
        expected[slot, :, : W - 2 + lengths[n]] = torch.cat([past[0, :, 1:], tokens[0].T], 1)
    on_device = pool.to(device)
    padded = with_unwritten_rows(x.to(device), 1, slice(8, 11))
    options = {"cu_seqlens": boundaries, "num_accepted_tokens": torch.tensor(accepted)}
    options |= {"state_indices": torch.tensor(slots), "has_initial_state": torch.tensor(has_past)}
    options = {name: value.to(device) for name, value in options.items()}
    ours = torch_gdn.causal_conv1d_update_(padded, weight.to(device), on_device, null_index=0, **options)
    assert_close("y", ours, y, 3e-7, head_dim=2)
    assert_same_bits("pool", on_device, expected)


def test_a_conversation_of_steps_is_a_plain_convolution(device: torch.device) -> None:
    """A prompt's columns go where drafting begins. 30 steps of 4 drafts follow, with random acceptance. The accepted
    outputs equal one long convolution.
    """
    W, S, prompt = 4, 6, 7
    tokens, weight = torch.randn(1, 200, D), torch.randn(D, W)
    exact, _ = reference.causal_conv1d(tokens.double(), weight.double())
    pool, accepted, at = torch.full((1, D, S), torch.nan, device=device), 1, prompt
    on_device, fresh = weight.to(device), torch.tensor([False], device=device)
    first = tokens[:, :prompt].to(device)
    outputs = [torch_gdn.causal_conv1d_update_(first, on_device, pool[..., : W - 1], has_initial_state=fresh).cpu()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        step = torch.randn(1, 4, D, generator=generator)
        taken = int(torch.randint(1, 5, (1,), generator=generator))
        step[:, :taken] = tokens[:, at : at + taken]
        counts = torch.tensor([accepted], device=device)
        y = torch_gdn.causal_conv1d_update_(step.to(device), on_device, pool, num_accepted_tokens=counts)
        outputs.append(y[:, :taken].cpu())
        at, accepted = at + taken, taken
    assert_close("y", torch.cat(outputs, 1), exact[:, :at], 3e-7, head_dim=2)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("num_accepted_tokens: expected .+, got 4 at 0", {"num_accepted_tokens": [4, 1]}),
        ("state_pool: expected W - 2 columns plus one per .+, got too few for 4 at 0", {"cu_seqlens": [0, 4, 5]}),
    ],
)
def test_wrong_contents_on_the_device(words: str, change: dict[str, Any]) -> None:
    """The next synchronisation raises the error, and other slots are unchanged."""
    device = ready("mps")
    pool = torch.randn(4, D, 5, device=device)
    before = pool.clone()
    options: dict[str, Any] = {"state_indices": [1, 2], "num_accepted_tokens": [1, 1], "cu_seqlens": [0, 3, 5]}
    options = {name: torch.tensor(value, device=device) for name, value in (options | change).items()}
    torch_gdn.causal_conv1d_update_(
        torch.randn(1, 5, D, device=device), torch.randn(D, 4, device=device), pool, **options
    )
    with pytest.raises(RuntimeError, match=rf"^causal_conv1d_update_: {words}\b"):
        torch.mps.synchronize()
    assert_same_bits("the other slots", pool[[0, 3]], before[[0, 3]])
