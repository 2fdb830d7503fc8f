"""How the kernels of a decoding step reach the memory of the simulated device: bytes, cache lines, dispatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import on_a_mac, ready

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac does not count a kernel's accesses to memory")
bfloat16 = torch.bfloat16


def only_kernel(profile: Any) -> Any:
    (figures,) = profile.kernels.values()
    assert figures.dispatches == 1
    return figures


def issued_bytes(figures: Any) -> int:
    return figures.device_bytes_issued_read + figures.device_bytes_issued_written


def coalesced(figures: Any) -> float:
    return figures.least_cache_lines / figures.cache_lines


@pytest.mark.parametrize("state_v_first", [False, True], ids=["value inner", "key inner"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192)])
def test_a_decoding_step_moves_its_state_once(K: int, V: int, state_v_first: bool) -> None:
    import mps_simulator

    device = ready("mps")
    case = make_case(1, K, V, H=1, HV=2, dtype=bfloat16)
    if state_v_first and case.initial_state is not None:
        case.initial_state = case.initial_state.mT.contiguous()
    there = case.to(device)
    gates: dict[str, Any] = {
        "use_gate_in_kernel": True,
        "A_log": torch.zeros(2, device=device),
        "use_beta_sigmoid_in_kernel": True,
    }
    with mps_simulator.profile(detailed=True) as profile:
        torch_gdn.fused_recurrent_gated_delta_rule(
            *there.qkv, **there.options, **gates, state_v_first=state_v_first, use_qk_l2norm_in_kernel=True
        )
    figures = only_kernel(profile)
    state, rows, gate_bytes = 2 * 2 * K * V * 4, 2 * (2 * K + 2 * V + 2 * V), 3 * 2 * 4
    assert issued_bytes(figures) <= 1.1 * (state + rows + gate_bytes)
    assert coalesced(figures) >= 0.9


@pytest.mark.parametrize("columns", [3, 4])
def test_a_decoding_step_of_the_convolution_moves_its_state_once(columns: int) -> None:
    import mps_simulator

    device = ready("mps")
    shapes = ((1, 1, 256), (256, 4), (3, 256, columns))
    x, weight, pool = (torch.randn(sizes).bfloat16().to(device) for sizes in shapes)
    with mps_simulator.profile(detailed=True) as profile:
        torch_gdn.causal_conv1d_update_(x, weight, pool, torch.tensor([1], device=device))
    figures = only_kernel(profile)
    assert issued_bytes(figures) <= 1.1 * (2 * x.nbytes + weight.nbytes + 2 * pool[1].nbytes)
    assert coalesced(figures) >= 0.9


@pytest.mark.parametrize("neighbours", ["tokens", "channels"])
def test_a_convolution_moves_whole_cache_lines(neighbours: str) -> None:
    import mps_simulator

    device = ready("mps")
    x = torch.randn(1, 128, 128).bfloat16().to(device)
    x = x.transpose(1, 2) if neighbours == "tokens" else x
    weight = torch.randn(128, 4).bfloat16().to(device)
    with mps_simulator.profile(detailed=True) as profile:
        torch.ops.gdn.causal_conv1d(x, weight)
    figures = only_kernel(profile)
    assert issued_bytes(figures) <= 1.15 * (2 * x.nbytes + weight.nbytes)
    assert coalesced(figures) >= 0.9
