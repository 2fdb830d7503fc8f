"""Compares quantized_linear, dequantize, and experts with packed weights with float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import launched, on_a_mac, ready
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn_check.registry.experts import OF_TOKENS, ExpertPoint, draw_down, draw_gate_up
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.quantized import QuantizedPoint, draw_dequantize, draw_linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {F32: 6e-7, BF16: 1.8e-3, F16: 2.2e-4}
PACKINGS = list(itertools.product((4, 8), (32, 64, 128)))


def run(device: torch.device, op: str, call: Call, kernel: str | None = None) -> Any:
    return launched(device, kernel or op, getattr(torch.ops.gdn, op), **to_device(call, device))


def assert_exact(op: str, call: Call, result: Tensor, bound: float) -> None:
    exact = getattr(reference, op)(**{name: doubled(x) for name, x in call.items() if name != "dtype"})
    assert_close(op, result.cpu(), exact, bound, head_dim=None)


def kernel_of(M: int) -> str:
    return "quantized_linear" if M <= 8 else "quantized_linear_tiles"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
@pytest.mark.parametrize("M", [1, 6, 37])
def test_equals_float64(device: torch.device, M: int, bits: int, group: int) -> None:
    """x and scales have each dtype. N and K are no multiples of what a threadgroup computes and stages."""
    for dtype, scale_dtype in ((BF16, None), (BF16, F32), (F16, None), (F16, F32), (F32, None)):
        point = QuantizedPoint(
            dtype, M=M, N=67, K=5 * group, bits=bits, group=group, scale_dtype=scale_dtype, biased=bits == 8
        )
        call = draw_linear(point)
        y = run(device, "quantized_linear", call, kernel_of(M))
        assert y.dtype == dtype
        assert_exact("quantized_linear", call, y, BOUND[dtype])


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


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = {"moe_gate_up": draw_gate_up, "moe_down": draw_down}
BOTH = ExpertPoint(BF16, E=6, k=2, D=192, I=64, IS=96, bits=4, shared_bits=4)
MIXED = [
    BOTH,
    replace(BOTH, dtype=F16, bits=8, shared_bits=0, group=64, IS=70),
    replace(BOTH, dtype=F32, bits=8, shared_bits=4, scale_dtype=F32),
    replace(BOTH, dtype=F16, bits=4, IS=0, scale_dtype=F32, group=64, aligned=False),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize("point", MIXED, ids=lambda point: point.name)
def test_packed_experts(device: torch.device, op: str, point: ExpertPoint) -> None:
    """There is no shared expert, or one that is packed with as many bits or others, or one that is not packed."""
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
