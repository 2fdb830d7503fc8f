"""Compares products with packed weights (codes, e4m3 and MXFP4), what they decode to, and experts with float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, launched, on_a_mac, ready
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.packed_models import words
from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.experts import OF_TOKENS, ExpertPoint, draw_down, draw_gate_up
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.quantized import QuantizedPoint, draw_dequantize, draw_linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {F32: 6e-7, BF16: 1.8e-3, F16: 2.2e-4}
PACKINGS = list(itertools.product((4, 8), (32, 64, 128)))


def run(device: torch.device, op: str, call: Call, kernel: str | None = None) -> Any:
    return launched(device, kernel or op, getattr(torch.ops.gdn, op), **to_device(call, device))


def multiply(device: torch.device, call: Call) -> Tensor:
    """Returns the product of the kernel for so many rows."""
    is_few = len(call["x"]) <= 8
    y: Tensor = run(device, "quantized_linear", call, "quantized_linear" if is_few else "quantized_linear_tiles").cpu()
    return y


def assert_exact(op: str, call: Call, result: Tensor, bound: float) -> None:
    exact = getattr(reference, op)(**{name: doubled(x) for name, x in call.items() if name != "dtype"})
    assert_close(op, result.cpu(), exact, bound, head_dim=None)


def assert_product(device: torch.device, point: QuantizedPoint, **changes: Tensor) -> None:
    call = draw_linear(point) | changes
    y = multiply(device, call)
    assert y.dtype == point.dtype
    adds_up = point.M > 8 and point.dtype == F32 and (point.e4m3 or point.mxfp4)
    assert_exact("quantized_linear", call, y, BOUND[point.dtype] * (2 if adds_up else 1))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
@pytest.mark.parametrize("M", [1, 6, 37])
def test_equals_float64(device: torch.device, M: int, bits: int, group: int) -> None:
    """x and scales have each dtype. N and K are no multiples of what a threadgroup computes and stages."""
    point = QuantizedPoint(M=M, N=67, K=5 * group, bits=bits, group=group, biased=bits == 8)
    for dtype, scale_dtype in ((BF16, None), (BF16, F32), (F16, None), (F16, F32), (F32, None)):
        assert_product(device, replace(point, dtype=dtype, scale_dtype=scale_dtype))


@pytest.mark.parametrize("M", [1, 6, 37])
def test_many_columns(device: torch.device, M: int) -> None:
    """There are more columns than a threadgroup stages at once."""
    call = draw_linear(QuantizedPoint(F32, M=M, N=5, K=4480, bits=4, group=64))
    bound = BOUND[F32] if M <= 8 else 2e-6  # tiles add K / 8 products to one sum
    assert_exact("quantized_linear", call, run(device, "quantized_linear", call), bound)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("M", [1, 9])
def test_symmetric_weights_lose_no_digits_to_their_offset(device: torch.device, M: int, bits: int) -> None:
    """If codes lie around their middle, biases are -middle * scales. With a constant x, sums of codes times x and of x
    alone would cancel.
    """
    call = draw_linear(QuantizedPoint(F32, M=M, N=40, K=1024, bits=bits, group=128))
    call |= {"biases": -(2.0 ** (bits - 1)) * call["scales"], "x": 1 + 0.001 * torch.randn(M, 1024)}
    assert_exact("quantized_linear", call, run(device, "quantized_linear", call), 2e-7 if M == 1 else 7e-7)


def test_shapes_of_x(device: torch.device) -> None:
    call = draw_linear(QuantizedPoint(M=6))
    expected = run(device, "quantized_linear", call)
    for shape in ((2, 3), (6, 1), (1, 2, 3)):
        y = run(device, "quantized_linear", call | {"x": call["x"].view(*shape, 128)})
        assert_same_bits("y", y, expected.view(*shape, 40))
    row = torch.ops.gdn.quantized_linear(**to_device(call | {"x": call["x"][0]}, device))
    assert row.shape == (40,)
    for shape in ((0,), (2, 0, 3)):
        empty = torch.ops.gdn.quantized_linear(**to_device(call | {"x": torch.zeros(*shape, 128)}, device))
        assert empty.shape == (*shape, 40)


@pytest.mark.parametrize("M", [2, 40])
def test_rows_too_far_apart_are_refused(M: int) -> None:
    """Kernels hold the stride of rows in 32 bits."""
    call = to_device(draw_linear(QuantizedPoint(BF16, M=M, N=1, K=64)), ready("mps"))
    columns = call["weight"].shape[1]
    call["weight"] = call["weight"].as_strided((1, columns), (2**31 - 1, 1))
    torch.ops.gdn.quantized_linear(**call)
    call["weight"] = call["weight"].as_strided((1, columns), (2**31, 1))
    with pytest.raises(ValueError, match="expected fewer than 2\\^31 elements from row to row, got 2147483648"):
        torch.ops.gdn.quantized_linear(**call)


@pytest.mark.parametrize("M", [8, 40])
def test_bits_do_not_depend_on_other_rows(M: int) -> None:
    device = ready("mps")
    call = draw_linear(QuantizedPoint(BF16, M=M, N=33, K=192, bits=4, group=64))
    order = torch.randperm(M)[: 5 if M == 8 else 30]
    y, part = (run(device, "quantized_linear", call | {"x": call["x"][rows]}) for rows in (slice(None), order))
    assert_same_bits("y", y[order], part)


# ---- numbers in place of codes ---------------------------------------------------------------------------------------

BYTES = torch.arange(256).byte()
E4M3 = BYTES.view(torch.float8_e4m3fn).float()
NAN = E4M3.isnan()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPONENTS = torch.arange(int(on_a_mac()), 255)  # 0 is 2^-127, a subnormal number, which a Mac may take for 0
EDGES = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257)  # of loads, tiles and blocks
OF_E4M3 = QuantizedPoint(F32, bits=8, e4m3=True)
OF_MXFP4 = QuantizedPoint(F32, bits=4, mxfp4=True)


@pytest.mark.parametrize("scale", [1.0, 2.0**-100])
def test_each_byte_is_pytorchs_number(device: torch.device, scale: float) -> None:
    """Subnormals and both zeros are exact in every bit, and the two NaNs stay NaN."""
    call = {"weight": BYTES.repeat(3, 1), "scales": torch.full((1, 2), scale), "biases": None, "bits": 8}
    rows = run(device, "dequantize", call).cpu()
    assert rows[:, NAN].isnan().all()
    for row in rows:
        assert_same_bits("rows", row[~NAN], E4M3[~NAN] * scale)


@pytest.mark.parametrize("M", [1, 2, 9])
@pytest.mark.parametrize("column", range(16))
def test_products_decode_each_byte(device: torch.device, M: int, column: int) -> None:
    """Each byte is at each place of the 16 bytes that a lane loads."""
    weight = torch.zeros(256, 16, dtype=torch.uint8)
    weight[:, column] = BYTES
    x = torch.zeros(M, 16)
    x[:, column] = 1
    call = {"x": x, "weight": weight, "scales": torch.ones(2, 1), "biases": None}
    y = multiply(device, call)
    assert y[:, NAN].isnan().all()
    assert torch.equal(y[:, ~NAN], E4M3[~NAN].expand(M, -1))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("M", [1, 6, 37])
def test_edges_of_blocks(device: torch.device, M: int, size: int) -> None:
    """N or K is at each edge, with a scale for each block, of float32 or bfloat16."""
    for dtype, scale_dtype in ((F32, F32), (F32, BF16)):
        for N, K in ((size, 144), (130, size)):
            assert_product(device, replace(OF_E4M3, dtype=dtype, M=M, N=N, K=K, scale_dtype=scale_dtype))


@pytest.mark.parametrize("M", [1, 37])
@pytest.mark.parametrize("scales", [(260, 1), (1, 1), (260, 3), (3, 1), (1, 3)], ids=str)
def test_scales_of_rows_and_of_all(device: torch.device, M: int, scales: tuple[int, int]) -> None:
    assert_product(device, replace(OF_E4M3, M=M, N=260, K=320), scales=(0.5 + torch.rand(scales)) / 128)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    for aligned in (True, False):
        assert_product(device, replace(OF_E4M3, dtype=dtype, M=6, N=70, K=400, aligned=aligned, biased=True))


@pytest.mark.parametrize("M", [1, 9])
def test_infinite_activations_stay_infinite(device: torch.device, M: int) -> None:
    """No second term of a sum, as codes have it, makes NaN of them."""
    call = draw_linear(replace(OF_E4M3, M=M, N=3, K=32))
    call |= {"x": torch.full((M, 32), torch.inf), "weight": torch.full((3, 32), 0x38, dtype=torch.uint8)}
    assert (multiply(device, call) == torch.inf).all()


def test_each_code_with_each_scale(device: torch.device) -> None:
    """Both zeros are exact in every bit. The scale 255 is NaN."""
    codes = torch.arange(16).repeat(len(EXPONENTS) + 1, 2)
    scales = torch.cat([EXPONENTS, torch.tensor([255])]).byte()[:, None]
    call = {"weight": words(codes, 4), "scales": scales, "biases": None, "bits": 4, "dtype": F32}
    rows = run(device, "dequantize", call).cpu()
    assert rows[-1].isnan().all()
    assert_same_bits("rows", rows[:-1], E2M1.repeat(2) * torch.exp2(EXPONENTS.double() - 127).float()[:, None])


@pytest.mark.sweep(8)
@pytest.mark.parametrize("M", [1, 2, 9])
@pytest.mark.parametrize("column", range(32))
def test_products_decode_each_code(device: torch.device, M: int, column: int) -> None:
    """Each code is at each place of the 16 bytes that a lane loads."""
    codes, x = torch.zeros(16, 32, dtype=torch.long), torch.zeros(M, 32)
    codes[:, column], x[:, column] = torch.arange(16), 1
    call = {"x": x, "weight": words(codes, 4), "scales": torch.full((16, 1), 127).byte(), "biases": None}
    assert torch.equal(multiply(device, call), E2M1.expand(M, -1))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("M", [1, 5, 37])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (33, 1088), (130, 96)])
@pytest.mark.parametrize("dtype", BOUND)
def test_products_of_mxfp4(device: torch.device, dtype: torch.dtype, N: int, K: int, M: int) -> None:
    for aligned in (True, False):
        assert_product(device, replace(OF_MXFP4, dtype=dtype, M=M, N=N, K=K, aligned=aligned, biased=True))


# ---- dequantize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), PACKINGS)
def test_rows(device: torch.device, bits: int, group: int) -> None:
    """Scales and results have each dtype, aligned or not. Indices of any shape select rows, or all rows are taken."""
    for dtype, scale_dtype, aligned in itertools.product(BOUND, BOUND, (True, False)):
        point = QuantizedPoint(
            dtype, N=5, K=3 * group, bits=bits, group=group, scale_dtype=scale_dtype, aligned=aligned
        )
        call = draw_dequantize(point)
        rows = run(device, "dequantize", call)
        assert rows.dtype == dtype
        assert_exact("dequantize", call, rows, 1e-7 if dtype == F32 else BOUND[dtype])
        for indices in (torch.tensor(4), torch.tensor([[1, 1], [0, 4]]).T, torch.tensor([3, 2, 0]).int()[::2]):
            assert_same_bits("rows", run(device, "dequantize", call | {"indices": indices}), rows[indices.long()])
    assert run(device, "dequantize", call | {"dtype": None}).dtype == call["scales"].dtype
    none = torch.ops.gdn.dequantize(**to_device(call | {"indices": torch.zeros(2, 0, dtype=torch.int64)}, device))
    assert none.shape == (2, 0, 3 * group)


@pytest.mark.parametrize("row", [5, -1, 2**40])
def test_wrong_rows(device: torch.device, row: int) -> None:
    """On `mps` wrong rows are reported, and become zeros."""
    call = draw_dequantize(QuantizedPoint(N=5)) | {"indices": torch.tensor([2, row])}
    message = f"dequantize: indices: expected rows from 0 to N - 1, got {row}"
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"{message} for N of 5"):
            run(device, "dequantize", call)
    elif not on_a_mac():
        rows = torch.ops.gdn.dequantize(**to_device(call, device))
        with pytest.raises(RuntimeError, match=f"{message} at 1"):
            torch.mps.synchronize()
        assert_same_bits("rows", rows.cpu()[0], run(device, "dequantize", call | {"indices": None})[2])
        assert not rows.cpu()[1].any()


# ---- the gradient of x -----------------------------------------------------------------------------------------------

OF_GRADIENTS = {F32: 2e-6, BF16: 3.5e-3, F16: 4.4e-4}
TRAINED = [REGISTRY["quantized_linear"].small]
TRAINED += [replace(TRAINED[0], dtype=dtype) for dtype in (BF16, F16)]
TRAINED += [replace(OF_E4M3, M=3, N=130, K=133), replace(OF_MXFP4, M=3, N=130, K=160)]


@pytest.mark.parametrize("point", TRAINED, ids=lambda point: point.name)
def test_the_gradient_of_x(device: torch.device, point: QuantizedPoint) -> None:
    drawn = draw_linear(point)
    packed = to_device(drawn, device)
    x = packed.pop("x").requires_grad_()
    y = torch_gdn.quantized_linear(x, **packed)
    dy = torch.randn(y.shape).to(point.dtype)
    with kernels_run(device, "dequantize"):
        (dx,) = torch.autograd.grad(y, x, dy.to(device), retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        (again,) = torch.autograd.grad(y, x, dy.to(device))
    assert_same_bits("dx in autocast", again, dx)
    weight = (doubled(drawn[name]) for name in ("weight", "scales", "biases"))
    exact = dy.double() @ reference.dequantize(*weight, point.bits, dtype=torch.float64)
    assert dx.dtype == point.dtype
    assert_close("dx", dx.cpu(), exact, OF_GRADIENTS[point.dtype], head_dim=None)


def test_a_bias_that_requires_grad_is_an_error(device: torch.device) -> None:
    call = to_device(draw_linear(TRAINED[0]), device)
    call["bias"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"quantized_linear: expected frozen weights and a frozen bias"):
        torch_gdn.quantized_linear(**call | {"x": call["x"].requires_grad_()}).sum().backward()


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = {"moe_gate_up": draw_gate_up, "moe_down": draw_down}
CODES = ExpertPoint(BF16, E=6, k=2, D=192, I=64, IS=96, bits=4, shared_bits=4)
BYTE = ExpertPoint(F32, E=5, k=2, D=192, I=80, IS=144, bits=8, shared_bits=8, e4m3=True)
MXFP4 = ExpertPoint(F32, E=5, k=2, D=192, I=96, IS=64, bits=4, shared_bits=4, mxfp4=True)
# The shared expert is packed with as many bits or others, or is not packed, or there is none.
POINTS = [
    CODES,
    replace(CODES, dtype=F16, bits=8, shared_bits=0, group=64, IS=70),
    replace(CODES, dtype=F32, bits=8, shared_bits=4, scale_dtype=F32),
    replace(CODES, dtype=F16, bits=4, IS=0, scale_dtype=F32, group=64, aligned=False),
    BYTE,  # the rows of up begin within a block
    replace(BYTE, dtype=BF16, I=128, shared_bits=0, scale_dtype=F32),
    replace(BYTE, dtype=F16, D=133, I=131, IS=0, scale_dtype=BF16, aligned=False),
    replace(BYTE, D=128, I=256, IS=0, e4m3_scales="all"),
    MXFP4,
    replace(MXFP4, dtype=BF16, shared_bits=0),
]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_experts(device: torch.device, op: str, point: ExpertPoint) -> None:
    for T in (0, 1, 6, 35):
        call = EXPERTS[op](replace(point, T=max(T, 1)))
        call = {name: x[:T] if name in OF_TOKENS else x for name, x in call.items()}
        result = getattr(torch.ops.gdn, op)(**to_device(call, device))
        exact = getattr(reference, op)(**{name: doubled(x) for name, x in call.items()})
        for x, expected in zip(
            *(each if isinstance(each, tuple) else (each,) for each in (result, exact)), strict=True
        ):
            if expected is not None:
                assert_close(f"{op} of {T} tokens", x.cpu(), expected, BOUND[point.dtype], head_dim=None)


@pytest.mark.parametrize(("up", "numbers"), [({"shared_bits": 4}, "4 and 32"), ({"e4m3": True}, "8 and 128")], ids=str)
def test_the_shared_experts_halves_are_packed_alike(up: dict[str, int], numbers: str) -> None:
    point = ExpertPoint(D=96, I=96, IS=96, bits=8, shared_bits=8)
    other = dict.fromkeys(["shared_up_biases"]) | draw_gate_up(replace(point, **up))
    mixed = draw_gate_up(point) | {name: x for name, x in other.items() if name.startswith("shared_up")}
    with pytest.raises(ValueError, match=f"shared_up_proj: expected the bits .* got {numbers} for 8 and 32"):
        torch_gdn.moe_gate_up(**mixed)
