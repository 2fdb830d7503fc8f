"""Launches, and device bytes by the simulated device's counts, compared with the weights of the active experts."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.devices import on_a_mac, ready
from torch_gdn.testing.experts import ExpertPoint, draw_down, draw_gate_up
from torch_gdn.testing.inputs import to_device

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")


def counted(point: ExpertPoint) -> tuple[float, list[str]]:
    """Issued bytes per byte of the active experts' weights, and the kernels that ran."""
    import mps_simulator

    gate_up, down = draw_gate_up(point), draw_down(point)
    down["topk_ids"] = gate_up["topk_ids"]
    active = len(gate_up["topk_ids"].clamp(min=-1).unique()) - (-1 in gate_up["topk_ids"])
    weights = 3 * point.D * (active * point.I + point.IS) * point.dtype.itemsize
    device = ready("mps")
    with mps_simulator.profile(detailed=True) as profile:
        for op, call in (("moe_gate_up", gate_up), ("moe_down", down)):
            getattr(torch.ops.gdn, op)(**to_device(call, device))
    figures = profile.kernels.items()
    issued = sum(each.device_bytes_issued_read + each.device_bytes_issued_written for _, each in figures)
    kernels = [name.partition("_bfloat")[0] for name, each in figures for _ in range(each.dispatches)]
    return issued / weights, kernels


@pytest.mark.parametrize(
    ("T", "E", "most"),
    [
        (1, 16, 1.05),
        (8, 64, 1.05),
        (8, 8, 1.14),  # 4 tokens an expert, whose vectors are read for every 32 rows; the weights are read once
    ],
)
def test_a_step_reads_the_weights_of_active_experts_once(T: int, E: int, most: float) -> None:
    issued, kernels = counted(ExpertPoint(torch.bfloat16, T=T, E=E, k=4, D=1024, I=256, IS=256))
    assert 1.0 <= issued <= most
    assert sorted(kernels) == ["moe_down", "moe_gate_up"]


def test_a_prompt_reads_them_once_for_32_pairs() -> None:
    """8 experts of 31 or 32 pairs each take 16 tiles at most, and the shared expert 2."""
    issued, kernels = counted(ExpertPoint(torch.bfloat16, T=64, E=8, k=4, D=512, I=128, IS=128))
    assert 1.0 <= issued <= 2.5
    assert sorted(kernels) == ["moe_align_32", "moe_align_32", "moe_down_tiles", "moe_gate_up_tiles", "moe_sum"]
