"""Compares launches and the simulated device's counts of device bytes with the weights of the active experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn_check.registry.experts import ExpertPoint, draw_down, draw_gate_up, draw_logits
from torch_gdn_check.registry.inputs import bytes_of, to_device

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
E4M3 = 43


def counted(point: ExpertPoint) -> tuple[int, int, int, list[str]]:
    """Returns the bytes issued, those of the active experts' weights, those of the inputs, and the kernels that ran.

    Each threadgroup reads its experts' vectors for 32 rows of gate and of up, and for 32 rows of down, or for 16 if
    they are packed. Each of its simdgroups reads topk_ids, but those of down only for several tokens.
    """
    gate_up, down = draw_gate_up(point), draw_down(point)
    ids = down["topk_ids"] = gate_up["topk_ids"]
    active = ids[ids >= 0].unique().long()
    weights = [
        (x[active] if name.startswith("w_") else x).nbytes
        for call in (gate_up, down)
        for name, x in call.items()
        if name.startswith("w_") or name.endswith(("_proj", "_scales", "_biases"))
    ]
    pairs, size = int((ids >= 0).sum()), point.dtype.itemsize
    rows = 32 if point.bits == 0 else 16
    inputs = size * (pairs * point.I + point.T * point.IS) * (2 * point.D // rows)
    inputs += ids.nbytes * (ids.numel() * point.I // 2 + (12 * point.D // rows if point.T > 1 else 0))
    device = ready("mps")
    with profiled(detailed=True) as profile:
        for op, call in (("moe_gate_up", gate_up), ("moe_down", down)):
            getattr(torch.ops.gdn, op)(**to_device(call, device))
    figures = profile.kernels.items()
    issued = sum(each.device_bytes_issued_read + each.device_bytes_issued_written for _, each in figures)
    kernels = [name.partition("_bfloat")[0] for name, each in figures for _ in range(each.dispatches)]
    return issued, sum(weights), inputs, kernels


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("T", "E", "bits", "most"),
    [
        (1, 16, 0, 1.05),
        (2, 4, 0, 1.05),  # both tokens choose all experts
        (8, 64, 0, 1.05),
        (8, 8, 0, 1.14),  # 4 tokens per expert
        (1, 16, 4, 1.17),
        (8, 8, 4, 1.85),
        (1, 16, E4M3, 1.12),
        (8, 8, E4M3, 1.5),
    ],
)
def test_a_step_reads_the_weights_of_active_experts_once(T: int, E: int, bits: int, most: float) -> None:
    """`most` bounds all bytes, including the inputs'. Each row of e4m3 numbers reads the scales of its blocks again."""
    codes: dict[str, Any] = {"e4m3": True, "scale_dtype": torch.float32} if bits == E4M3 else {"group": 64}
    codes["bits"] = codes["shared_bits"] = min(bits, 8)
    point = ExpertPoint(torch.bfloat16, T=T, E=E, k=4, D=1024, I=256, IS=256, **codes)
    issued, weights, inputs, kernels = counted(point)
    assert 1.0 <= (issued - inputs) / weights <= 1.05
    assert issued / weights <= most
    assert sorted(kernels) == ["moe_down", "moe_gate_up"]


def test_a_prompt_reads_them_once_for_32_pairs() -> None:
    """8 experts of 31 or 32 pairs take at most 16 tiles each, and the shared expert 2."""
    issued, weights, _, kernels = counted(ExpertPoint(torch.bfloat16, T=64, E=8, k=4, D=512, I=128, IS=128))
    assert 1.0 <= issued / weights <= 2.5
    assert sorted(kernels) == ["moe_align_32", "moe_align_32", "moe_down_tiles", "moe_gate_up_tiles", "moe_sum"]


@pytest.mark.parametrize(
    ("T", "kernel", "tokens", "experts"),  # per threadgroup
    [
        (1, "moe_logits_bfloat_1_4", 8, 4),
        (64, "moe_logits_bfloat_8_4", 8, 4),
        (96, "quantized_linear_tiles_bfloat_4_0_float", 32, 64),
    ],
)
def test_logits_read_the_weight_once_for_the_tokens_of_a_threadgroup(
    T: int, kernel: str, tokens: int, experts: int
) -> None:
    call = draw_logits(ExpertPoint(torch.bfloat16, T=T, E=128, D=2048))
    on_device = to_device(call, ready("mps"))
    with profiled(detailed=True) as profile:
        logits = torch.ops.gdn.moe_logits(**on_device)
    ((name, figures),) = profile.kernels.items()
    assert (name, figures.dispatches) == (kernel, 1)
    least = -(-T // tokens) * bytes_of(call["weight"]) + 128 // experts * bytes_of(call["x"]) + bytes_of(logits)
    assert least <= figures.device_bytes_issued_read + figures.device_bytes_issued_written <= 1.01 * least
