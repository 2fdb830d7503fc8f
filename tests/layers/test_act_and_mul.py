from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import act_and_mul, reference
from torch_gdn_check.registry.bounds import ROUNDING


def exact(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    return reference.act_and_mul(gate.double(), up.double(), activation)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, activation: str) -> None:
    """Rows have one vector, the elements of several threadgroups, or an odd length."""
    for shape in ((2, 3, 5, 4), (3, 2100), (7,), (2, 33)):
        gate, up = (8 * torch.randn(2, *shape)).to(dtype)
        y = launched(device, "act_and_mul", act_and_mul, gate.to(device), up.to(device), activation).cpu()
        assert y.dtype == dtype and y.shape == shape and y.is_contiguous()
        assert_close("y", y, exact(gate, up, activation), ROUNDING[dtype], head_dim=None)


def test_halves_of_a_projection(device: torch.device) -> None:
    """gate and up are adjacent, as in an engine, or the gate follows each head's q, as in attention."""
    whole = torch.randn(3, 4, 2 * 64).to(device)
    for size in (64, 63):  # aligned rows, and others
        gate, up = whole[..., :size], whole[..., size : 2 * size]
        y = launched(device, "act_and_mul", act_and_mul, gate, up)
        assert_same_bits("halves", y, act_and_mul(gate.contiguous(), up.contiguous()))
    heads = torch.randn(2, 5, 3, 16).to(device).transpose(1, 2)
    gate = whole[:2, :3, :80].unflatten(-1, (5, 16))
    y = launched(device, "act_and_mul", act_and_mul, gate, heads, "sigmoid")
    assert_same_bits("heads", y, act_and_mul(gate.contiguous(), heads.contiguous(), "sigmoid"))


def test_large_logits_and_nan(device: torch.device) -> None:
    gate = torch.tensor([-1e4, 1e4, torch.nan, 0.0, -90.0])
    up = torch.tensor([2.0, 2.0, 2.0, torch.nan, 1.0])
    with kernels_run(device, "act_and_mul"):
        silu, sigmoid = (act_and_mul(gate.to(device), up.to(device), each).cpu() for each in ("silu", "sigmoid"))
    assert silu[:2].tolist() == [0.0, 2e4] and silu[2:4].isnan().all() and abs(silu[4]) < 1e-36
    assert sigmoid[:2].tolist() == [0.0, 2.0] and sigmoid[2:4].isnan().all()
