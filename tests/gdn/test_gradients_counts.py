"""Compares the bytes that the kernels of the gradients ask for with those of their tensors, each byte once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.gradients import RULES, draw_call, draw_outer
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
MOST = 1.15


def assert_few_bytes(run: Callable[[], Any], kernels: int) -> None:
    with profiled(detailed=True) as profile:
        run()
    assert len(profile.kernels) == kernels, profile
    for name, figures in profile.kernels.items():
        issued = figures.device_bytes_issued_read + figures.device_bytes_issued_written
        distinct = figures.device_bytes_distinct_read + figures.device_bytes_distinct_written
        assert distinct <= issued <= MOST * distinct, f"{name}: {issued / distinct:.3f}"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_of_the_rules(rule: str, dtype: torch.dtype) -> None:
    call = draw_call(rule, 64, 128, 128, B=1, H=4, HV=8, dtype=dtype)  # a head for each core
    do, dht = draw_outer(call)
    on_device = to_device(call | {"do": do, "dht": dht}, ready("mps"))
    assert_few_bytes(lambda: getattr(torch.ops.gdn, f"{rule}_bwd")(**on_device), 8)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_of_the_layers(dtype: torch.dtype) -> None:
    device = ready("mps")

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes).to(dtype).to(device)

    ops, F32, gates = torch.ops.gdn, torch.float32, (1, 128, 4, 128)
    x, dy, weight, state, dstate = (draw(*sizes) for sizes in (*[(1, 128, 512)] * 2, (512, 4), *[(1, 512, 3)] * 2))
    x4, dy4, gate = (draw(*gates) for _ in range(3))
    raw_gate, A_log, bias = draw(*gates, dtype=F32), draw(4, dtype=F32), draw(512, dtype=F32)
    assert_few_bytes(lambda: ops.norm_bwd(dy, x, draw(512), None, None, "silu", 1e-6, False, False, True), 2)
    assert_few_bytes(lambda: ops.norm_bwd(dy4, x4, draw(128), gate, None, "silu", 1e-6, False, False, True), 2)
    assert_few_bytes(lambda: ops.fused_kda_gate_bwd(raw_gate, gate, A_log, bias), 2)
    assert_few_bytes(lambda: ops.causal_conv1d_bwd(dy, x, weight, None, state, dstate, "silu", None, None, True), 3)
