"""Tests the simulated device's counts of bytes and operations in products with packed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn_check.registry.inputs import Call, bytes_of, to_device
from torch_gdn_check.registry.quantized import QuantizedPoint, draw_linear

pytestmark = [pytest.mark.sweep(4), pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")]
BF16 = torch.bfloat16


def counted(op: str, call: Call) -> dict[str, Any]:
    on_device = to_device(call, ready("mps"))
    with profiled(detailed=True) as profile:
        getattr(torch.ops.gdn, op)(**on_device)
    return dict(profile.kernels)


@pytest.mark.parametrize(("bits", "most"), [(4, 1.12), (8, 1.06)])
def test_few_rows_read_each_weight_once(bits: int, most: float) -> None:
    """Each threadgroup reads x for its 32 rows of the weight, and reads codes, scales and biases once."""
    for M in (1, 8):
        call = draw_linear(QuantizedPoint(BF16, M=M, N=256, K=2048, bits=bits, group=64))
        ((name, figures),) = counted("quantized_linear", call).items()
        assert name == f"quantized_linear_bfloat_{M}_4_{bits}"
        packed = bytes_of(call["weight"], call["scales"], call["biases"])
        issued = figures.device_bytes_issued_read + figures.device_bytes_issued_written
        x_bytes = bytes_of(call["x"]) * 256 // 32
        assert 1.0 <= (issued - x_bytes) / packed <= 1.02
        assert M > 1 or issued / packed <= most
        # copying x to threadgroup memory takes 8 times the least cycles, so that a lane's reads can take the least
        assert figures.bank_cycles <= 1.6 * figures.least_bank_cycles
        assert figures.operations_issued["fma"] <= 2.15 * M * 256 * 2048


@pytest.mark.parametrize("scale_dtype", [BF16, torch.float32])
def test_few_rows_read_each_e4m3_number_once(scale_dtype: torch.dtype) -> None:
    """Each row of the weight reads the scales of its blocks again, which are 1 to 32 or 64 of its bytes."""
    for M in (1, 8):
        point = QuantizedPoint(BF16, M=M, N=256, K=2048, bits=8, e4m3=True, scale_dtype=scale_dtype)
        call = draw_linear(point)
        ((name, figures),) = counted("quantized_linear", call).items()
        assert name == f"quantized_linear_bfloat_{M}_4_43"
        packed = bytes_of(call["weight"], call["scales"])
        issued = figures.device_bytes_issued_read + figures.device_bytes_issued_written
        assert 1.0 <= (issued - bytes_of(call["x"]) * 256 // 32) / packed <= 1.05
        assert figures.operations_issued["fma"] <= 2.15 * M * 256 * 2048


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_read_it_once_for_32(bits: int) -> None:
    call = draw_linear(QuantizedPoint(BF16, M=64, N=128, K=512, bits=bits, group=64))
    ((name, figures),) = counted("quantized_linear", call).items()
    assert name == f"quantized_linear_tiles_bfloat_4_{bits}"
    packed, product = bytes_of(call["weight"], call["scales"], call["biases"]), 64 * 128 * 512
    # a tile of 32 columns reads half of a group, and its scale
    tiles = 64 // 32 * packed + 128 // 64 * bytes_of(call["x"]) + 64 * 128 * 2
    assert tiles <= figures.device_bytes_issued_read + figures.device_bytes_issued_written <= 1.05 * tiles
    assert figures.matrix_multiplies * 512 == product
    decoding = sum(figures.operations_issued.get(kind, 0) for kind in ("fma", "add", "mul"))
    assert decoding <= 0.1 * product
