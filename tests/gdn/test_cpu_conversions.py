"""Tests the CPU kernels' conversions between f32 and 16 bits: every value must round as in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def every_16_bit_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_survives(dtype: torch.dtype) -> None:
    """A convolution of one tap copies each value. NaN stays NaN."""
    x = every_16_bit_value(dtype).view(1, 1, -1)
    weight = torch.tensor([0.0, 1.0], dtype=dtype).expand(x.shape[2], 2)
    y, _ = torch.ops.gdn.causal_conv1d(x, weight)
    torch.testing.assert_close(y, x + 0, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_f32_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """The values are the middles between neighbouring 16-bit values, and the floats next to those."""
    values = every_16_bit_value(dtype).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:].double() + values[:-1].double()).div(2).float()
    around = torch.cat([middles, middles.nextafter(torch.tensor(3e38)), middles.nextafter(torch.tensor(-3e38))])
    x = torch.cat([around, torch.tensor([65519.0, 65520.0, -65520.0, 1e30, 3.4e38, torch.inf, torch.nan])])
    pool = torch.zeros(1, len(x), 1, dtype=dtype)
    torch.ops.gdn.causal_conv1d_update_(x.view(1, 1, -1), torch.zeros(len(x), 2), pool)
    torch.testing.assert_close(pool[0, :, 0], x.to(dtype), rtol=0, atol=0, equal_nan=True)
