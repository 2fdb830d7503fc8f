"""Tests that ops on rows take tensors of any number of dimensions, and segments with strides."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.entries import assert_exact
from tests.helpers.errors import assert_same_bits
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import tensors_of, to_device
from torch_gdn_check.registry.layers import RowPoint

POINT = RowPoint(D=64)
each_op = pytest.mark.parametrize("op", [op for op, x in REGISTRY.items() if type(x.small) is RowPoint])


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 2, 3), (2, 0)], ids=str)
@each_op
def test_any_number_of_dimensions(device: torch.device, op: str, shape: tuple[int, ...]) -> None:
    """A tensor without rows needs no launch."""
    entry = REGISTRY[op]
    call = entry.call(POINT)
    rows = max((call[name].shape for name in tensors_of(call)), key=len)
    for name in tensors_of(call):
        if call[name].shape == rows:
            kept = rows[-2:] if op.startswith("fused_kda_gate") else rows[-1:]
            call[name] = torch.randn(*shape, *kept, dtype=call[name].dtype)
    results = entry.run(to_device(call, device))
    first = results[0] if isinstance(results, tuple) else results
    assert first.shape[: len(shape)] == shape
    if first.numel():
        assert_exact(entry, POINT, call, device)


@pytest.mark.parametrize("T", [3, 40])
def test_segments_with_strides(device: torch.device, T: int) -> None:
    x, weight, bias = (each.to(device) for each in (torch.randn(2, T, 12), torch.randn(12, 4), torch.randn(12)))
    runs = torch.arange(T).div(2, rounding_mode="floor").expand(2, T).contiguous().to(device)
    expected, _ = torch.ops.gdn.causal_conv1d(x, weight, bias, seq_idx=runs)
    for strided in (runs.repeat_interleave(2, 1)[:, ::2], runs.T.contiguous().T):
        y, _ = torch.ops.gdn.causal_conv1d(x, weight, bias, seq_idx=strided)
        assert_same_bits("y", y, expected)
