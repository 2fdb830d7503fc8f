"""Tests the gate of Kimi Delta Attention, which makes log decays from a projection."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference

HV, K = 3, 20


def raw_gate(scale: float = 10.0) -> torch.Tensor:
    return scale * torch.randn(2, 7, HV, K)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_rate", [False, True])
def test_equals_the_reference(device: torch.device, has_rate: bool, has_bias: bool, lower_bound: float | None) -> None:
    g = raw_gate()
    A_log = torch.randn(1, 1, HV, 1) if has_rate else None
    dt_bias = torch.randn(HV * K) if has_bias else None
    exact = reference.fused_kda_gate(g.double(), A_log, dt_bias, lower_bound)
    on_device = [None if x is None else x.to(device) for x in (g, A_log, dt_bias)]
    result = torch_gdn.fused_kda_gate(*on_device, lower_bound)  # type: ignore[arg-type]
    assert result.dtype == torch.float32 and result.shape == g.shape
    assert_close("g", result, exact, 3e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_computes_in_float32_and_rounds_once(device: torch.device, dtype: torch.dtype) -> None:
    g, A_log = raw_gate(1.0).to(dtype), torch.randn(HV).to(dtype)
    exact = reference.fused_kda_gate(g.double(), A_log)
    result = torch_gdn.fused_kda_gate(g.to(device), A_log.to(device), output_dtype=dtype)
    assert result.dtype == dtype
    rounding = ((exact.to(dtype).double() - exact).norm() / exact.norm()).item()
    assert ((result.cpu().double() - exact).norm() / exact.norm()).item() < 1.05 * rounding + 2e-7


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("channels", [1, 16, 24, 40, 120])
def test_a_value_does_not_depend_on_its_position(
    device: torch.device, channels: int, lower_bound: float | None
) -> None:
    """A token alone has the bits that it has among others, and so has a channel behind other channels."""
    g, A_log, dt_bias = (torch.randn(size).to(device) for size in ((5, 2, channels), (2,), (2, channels)))
    together = torch_gdn.fused_kda_gate(g, A_log, dt_bias, lower_bound)
    alone = [torch_gdn.fused_kda_gate(token, A_log, dt_bias, lower_bound) for token in g]
    assert_same_bits("token by token", torch.stack(alone), together)
    last = torch_gdn.fused_kda_gate(g[..., -1:], A_log, dt_bias[:, -1:], lower_bound)
    assert_same_bits("channel by channel", last, together[..., -1:])


def test_a_bounded_gate_stays_within_its_bound() -> None:
    g = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30]).view(1, 5)
    result = torch_gdn.fused_kda_gate(g, torch.tensor([3.0]), lower_bound=-5.0)
    assert result.flatten().tolist() == [0.0, 0.0, -2.5, -5.0, -5.0]


def test_a_large_unbounded_gate_is_linear() -> None:
    result = torch_gdn.fused_kda_gate(torch.tensor([[-200.0, 50.0, 1e4]]), torch.zeros(1))
    assert result.flatten().tolist() == [0.0, -50.0, -1e4]
