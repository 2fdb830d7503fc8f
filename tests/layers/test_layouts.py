"""Layers whose small tensors lie anywhere in memory."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference


def test_the_weights_of_norms_without_alignment(device: torch.device) -> None:
    x, g, weight = torch.randn(2, 5, 3, 64), 3 * torch.randn(2, 5, 3, 64), torch.rand(64)
    there = torch.cat([weight.new_zeros(1), weight]).to(device)[1:]
    y = torch.ops.gdn.rms_norm_gated(x.to(device), g.to(device), there).cpu()
    assert_close("y", y, reference.rms_norm_gated(x.double(), g.double(), weight.double()), 3e-7)
    y, _ = torch.ops.gdn.rms_norm(x.to(device), there, g.to(device))
    assert_close("y", y.cpu(), reference.rms_norm(x.double(), weight.double(), g.double())[0], 3e-7)


@pytest.mark.parametrize("T", [3, 40])
def test_segments_with_strides(device: torch.device, T: int) -> None:
    x, weight, bias = (each.to(device) for each in (torch.randn(2, T, 12), torch.randn(12, 4), torch.randn(12)))
    runs = torch.arange(T).div(2, rounding_mode="floor").expand(2, T).contiguous().to(device)
    expected, _ = torch.ops.gdn.causal_conv1d(x, weight, bias, seq_idx=runs)
    for strided in (runs.repeat_interleave(2, 1)[:, ::2], runs.T.contiguous().T):
        y, _ = torch.ops.gdn.causal_conv1d(x, weight, bias, seq_idx=strided)
        assert_same_bits("y", y, expected)
