"""Tests the gradient of x in `quantized_linear`, whose weights are frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, to_device

BOUND = {torch.float32: 2e-6, torch.bfloat16: 3.5e-3, torch.float16: 4.4e-4}


def drawn(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Call]:
    call = to_device(REGISTRY["quantized_linear"].smallest(dtype=dtype), device)
    return call.pop("x").requires_grad_(), call


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_multiplies_by_the_weights(device: torch.device, dtype: torch.dtype) -> None:
    x, packed = drawn(device, dtype)
    y = torch_gdn.quantized_linear(x, **packed)
    dy = torch.randn(y.shape).to(dtype)
    with kernels_run(device, "dequantize"):
        (dx,) = torch.autograd.grad(y, x, dy.to(device), retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        (again,) = torch.autograd.grad(y, x, dy.to(device))
    assert_same_bits("dx in autocast", again, dx)
    bits = 32 * packed["weight"].shape[-1] // x.shape[-1]
    numbers = torch_gdn.dequantize(packed["weight"], packed["scales"], packed["biases"], bits, dtype=torch.float32)
    assert dx.dtype == dtype
    assert_close("dx", dx.cpu(), dy.double() @ numbers.cpu().double(), BOUND[dtype], None)


def test_a_bias_that_requires_grad_is_an_error(device: torch.device) -> None:
    x, packed = drawn(device, torch.float32)
    bias = torch.zeros(packed["weight"].shape[0], device=device, requires_grad=True)
    y = torch_gdn.quantized_linear(x, **(packed | {"bias": bias}))
    with pytest.raises(RuntimeError, match=r"quantized_linear: expected frozen weights and a frozen bias"):
        y.sum().backward()
