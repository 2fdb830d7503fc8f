"""Compares products with MXFP4 weights, e2m1 numbers and e8m0 scales, with exact values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import kernels_run, launched, on_a_mac
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.packed_models import words
from torch_gdn import quantized_linear, reference
from torch_gdn_check.registry.experts import ExpertPoint, draw_down, draw_gate_up
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.quantized import QuantizedPoint, draw_linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {F32: 6e-7, BF16: 1.8e-3, F16: 2.2e-4}
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPONENTS = torch.arange(int(on_a_mac()), 255)  # 0 is 2^-127, a subnormal number, which a Mac may take for 0
POINT = QuantizedPoint(F32, bits=4, mxfp4=True)


def run(device: torch.device, op: str, call: Call, kernel: str | None = None) -> Tensor:
    result: Tensor = launched(device, kernel or op, getattr(torch.ops.gdn, op), **to_device(call, device))
    return result


def test_each_code_with_each_scale(device: torch.device) -> None:
    """Both zeros are exact in every bit. The scale 255 is NaN."""
    codes = torch.arange(16).repeat(len(EXPONENTS) + 1, 2)
    scales = torch.cat([EXPONENTS, torch.tensor([255])]).byte()[:, None]
    call = {"weight": words(codes, 4), "scales": scales, "biases": None, "bits": 4, "dtype": F32}
    rows = run(device, "dequantize", call).cpu()
    assert rows[-1].isnan().all()
    assert_same_bits("rows", rows[:-1], NUMBERS.repeat(2) * torch.exp2(EXPONENTS.double() - 127).float()[:, None])


@pytest.mark.parametrize("M", [1, 2, 9])
@pytest.mark.parametrize("column", range(32))
def test_products_decode_each_code(device: torch.device, M: int, column: int) -> None:
    """Each code is at each place of the 16 bytes that a lane loads."""
    codes, x = torch.zeros(16, 32, dtype=torch.long), torch.zeros(M, 32)
    codes[:, column], x[:, column] = torch.arange(16), 1
    call = {"x": x, "weight": words(codes, 4), "scales": torch.full((16, 1), 127).byte(), "biases": None}
    y = run(device, "quantized_linear", call, "quantized_linear" if M <= 8 else "quantized_linear_tiles").cpu()
    assert torch.equal(y, NUMBERS.expand(M, -1))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("M", [1, 5, 37])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (33, 1088), (130, 96)])
@pytest.mark.parametrize("dtype", BOUND)
def test_products(device: torch.device, dtype: torch.dtype, N: int, K: int, M: int) -> None:
    for aligned in (True, False):
        call = draw_linear(replace(POINT, dtype=dtype, M=M, N=N, K=K, aligned=aligned, biased=True))
        y = run(device, "quantized_linear", call, "quantized_linear" if M <= 8 else "quantized_linear_tiles")
        exact = reference.quantized_linear(**{name: doubled(x) for name, x in call.items()})
        bound = BOUND[dtype] if M <= 8 or dtype != F32 else 2 * BOUND[F32]
        assert_close("y", y.cpu(), exact, bound, head_dim=None)


EXPERTS = {"moe_gate_up": draw_gate_up, "moe_down": draw_down}
BOTH = ExpertPoint(F32, E=5, k=2, D=192, I=96, IS=64, bits=4, shared_bits=4, mxfp4=True)


@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize("point", [BOTH, replace(BOTH, dtype=BF16, shared_bits=0)], ids=lambda point: point.name)
def test_experts(device: torch.device, op: str, point: ExpertPoint) -> None:
    for T in (1, 6, 35):
        call = EXPERTS[op](replace(point, T=T))
        result = getattr(torch.ops.gdn, op)(**to_device(call, device))
        exact = getattr(reference, op)(**{name: doubled(x) for name, x in call.items()})
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (result, exact)), strict=True)
        for x, expected in pairs:
            assert_close(f"{op} of {T} tokens", x.cpu(), expected, BOUND[point.dtype], head_dim=None)


def test_the_gradient_of_x(device: torch.device) -> None:
    call = to_device(draw_linear(replace(POINT, M=3, N=130, K=160)), device)
    x = call.pop("x").requires_grad_()
    y = quantized_linear(x, **call)
    dy = torch.randn(y.shape)
    with kernels_run(device, "dequantize"):
        (dx,) = torch.autograd.grad(y, x, dy.to(device))
    exact = dy.double() @ reference.dequantize(call["weight"].cpu(), call["scales"].cpu(), None, 4, dtype=torch.float64)
    assert_close("dx", dx.cpu(), exact, 2e-6, None)
