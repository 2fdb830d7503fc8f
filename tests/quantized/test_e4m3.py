"""Compares products with e4m3 numbers, and their decoding, with exact values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn_check.registry.experts import OF_TOKENS, ExpertPoint, draw_down, draw_gate_up
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.quantized import QuantizedPoint, draw_linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {F32: 6e-7, BF16: 1.8e-3, F16: 2.2e-4}
BYTES = torch.arange(256).byte()
NUMBERS = BYTES.view(torch.float8_e4m3fn).float()
NAN = NUMBERS.isnan()
EDGES = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257)  # of loads, tiles and blocks
POINT = QuantizedPoint(F32, bits=8, e4m3=True)


def run(device: torch.device, op: str, call: Call, kernel: str | None = None) -> Tensor:
    result: Tensor = launched(device, kernel or op, getattr(torch.ops.gdn, op), **to_device(call, device))
    return result


def assert_exact(device: torch.device, point: QuantizedPoint, **changes: Tensor) -> None:
    call = draw_linear(point) | changes
    y = run(device, "quantized_linear", call, "quantized_linear" if point.M <= 8 else "quantized_linear_tiles")
    assert y.dtype == point.dtype
    exact = reference.quantized_linear(**{name: doubled(x) for name, x in call.items()})
    assert_close(f"{point.name}", y.cpu(), exact, BOUND[point.dtype] if point.M <= 8 else 2 * BOUND[F32], head_dim=None)


@pytest.mark.parametrize("scale", [1.0, 2.0**-100])
def test_each_byte_is_pytorchs_number(device: torch.device, scale: float) -> None:
    """Subnormals and both zeros are exact in every bit, and the two NaNs stay NaN."""
    call = {"weight": BYTES.repeat(3, 1), "scales": torch.full((1, 2), scale), "biases": None, "bits": 8}
    rows = run(device, "dequantize", call).cpu()
    assert rows[:, NAN].isnan().all()
    for row in rows:
        assert_same_bits("rows", row[~NAN], NUMBERS[~NAN] * scale)


@pytest.mark.parametrize("M", [1, 2, 9])
@pytest.mark.parametrize("column", range(16))
def test_products_decode_each_byte(device: torch.device, M: int, column: int) -> None:
    """Each byte is at each place of the 16 bytes that a lane loads."""
    weight = torch.zeros(256, 16, dtype=torch.uint8)
    weight[:, column] = BYTES
    x = torch.zeros(M, 16)
    x[:, column] = 1
    call = {"x": x, "weight": weight, "scales": torch.ones(2, 1), "biases": None}
    y = run(device, "quantized_linear", call, "quantized_linear" if M <= 8 else "quantized_linear_tiles").cpu()
    assert y[:, NAN].isnan().all()
    assert torch.equal(y[:, ~NAN], NUMBERS[~NAN].expand(M, -1))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("M", [1, 6, 37])
def test_edges_of_blocks(device: torch.device, M: int, size: int) -> None:
    """N or K is at each edge, with a scale for each block, of float32 or bfloat16."""
    for dtype, scale_dtype in ((F32, F32), (F32, BF16)):
        for N, K in ((size, 144), (130, size)):
            assert_exact(device, replace(POINT, dtype=dtype, M=M, N=N, K=K, scale_dtype=scale_dtype))


@pytest.mark.parametrize("M", [1, 37])
@pytest.mark.parametrize("scales", [(260, 1), (1, 1), (260, 3), (3, 1), (1, 3)], ids=str)
def test_scales_of_rows_and_of_all(device: torch.device, M: int, scales: tuple[int, int]) -> None:
    assert_exact(device, replace(POINT, M=M, N=260, K=320), scales=(0.5 + torch.rand(scales)) / 128)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    for aligned in (True, False):
        call = draw_linear(replace(POINT, dtype=dtype, M=6, N=70, K=400, aligned=aligned, biased=True))
        exact = reference.quantized_linear(**{name: doubled(x) for name, x in call.items()})
        assert_close("y", run(device, "quantized_linear", call).cpu(), exact, BOUND[dtype], head_dim=None)


@pytest.mark.parametrize("M", [1, 9])
def test_infinite_activations_stay_infinite(device: torch.device, M: int) -> None:
    """No second term of a sum, as codes have it, makes NaN of them."""
    call = draw_linear(replace(POINT, M=M, N=3, K=32))
    call |= {"x": torch.full((M, 32), torch.inf), "weight": torch.full((3, 32), 0x38, dtype=torch.uint8)}
    assert (run(device, "quantized_linear", call, None if M == 1 else "quantized_linear_tiles") == torch.inf).all()


EXPERTS = {"moe_gate_up": draw_gate_up, "moe_down": draw_down}
BOTH = ExpertPoint(F32, E=5, k=2, D=192, I=80, IS=144, bits=8, shared_bits=8, e4m3=True)
MIXED = [
    BOTH,  # the rows of up begin within a block
    replace(BOTH, dtype=BF16, I=128, shared_bits=0, scale_dtype=F32),
    replace(BOTH, dtype=F16, D=133, I=131, IS=0, scale_dtype=BF16, aligned=False),
    replace(BOTH, D=128, I=256, IS=0, e4m3_scales="all"),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize("point", MIXED, ids=lambda point: point.name)
def test_experts(device: torch.device, op: str, point: ExpertPoint) -> None:
    for T in (1, 6, 35):
        call = EXPERTS[op](replace(point, T=T))
        result = getattr(torch.ops.gdn, op)(**to_device(call, device))
        exact = getattr(reference, op)(**{name: doubled(x) for name, x in call.items()})
        for x, expected in zip(
            *(each if isinstance(each, tuple) else (each,) for each in (result, exact)), strict=True
        ):
            if expected is not None:
                assert_close(f"{op} of {T} tokens", x.cpu(), expected, BOUND[point.dtype], head_dim=None)
    none = {name: x[:0] if name in OF_TOKENS else x for name, x in call.items()}
    for x in getattr(torch.ops.gdn, op)(**to_device(none, device)):
        assert not x.numel()


def test_the_gradient_of_x(device: torch.device) -> None:
    call = to_device(draw_linear(replace(POINT, M=3, N=130, K=133)), device)
    x = call.pop("x").requires_grad_()
    y = torch_gdn.quantized_linear(x, **call)
    dy = torch.randn(y.shape)
    with kernels_run(device, "dequantize"):
        (dx,) = torch.autograd.grad(y, x, dy.to(device))
    exact = dy.double() @ reference.dequantize(call["weight"].cpu(), call["scales"].cpu().double(), None, 8)
    assert_close("dx", dx.cpu(), exact, 2e-6, None)


@pytest.mark.parametrize(("up", "numbers"), [({"shared_bits": 4}, "4 and 32"), ({"e4m3": True}, "8 and 128")], ids=str)
def test_the_shared_experts_halves_are_packed_alike(up: dict[str, int], numbers: str) -> None:
    point = ExpertPoint(D=96, I=96, IS=96, bits=8, shared_bits=8)
    other = dict.fromkeys(["shared_up_biases"]) | draw_gate_up(replace(point, **up))
    mixed = draw_gate_up(point) | {name: x for name, x in other.items() if name.startswith("shared_up")}
    with pytest.raises(ValueError, match=f"shared_up_proj: expected the bits .* got {numbers} for 8 and 32"):
        torch_gdn.moe_gate_up(**mixed)
