"""Tests the options of both end-to-end ops: gates and beta made in the op, channel decays, heads, output."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import END_TO_END_OPS, Case, assert_exact, make_case, run
from tests.helpers.devices import on_a_mac, profiled
from tests.helpers.errors import assert_same_bits
from tests.helpers.prefill import each_op
from torch_gdn_check.registry.cases import channels_of

pytestmark = pytest.mark.sweep(6)

RECURRENT, CHUNK = "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def raw_gates(case: Case, dtype: torch.dtype = torch.float32, bias: bool = True) -> dict[str, Any]:
    """Makes g raw, between -60 and 60 as a projection gives it, and returns the options that go with it in models."""
    HV = case.g.shape[2]
    case.g = torch.randn(case.g.shape, generator=torch.Generator().manual_seed(7)).mul(4).to(dtype)
    if case.g.shape[1] > 3:
        case.g[:, 1], case.g[:, 2], case.g[:, 3] = 60.0, -60.0, 0.0
    A_log = torch.linspace(-3.0, 1.0, HV).to(dtype)
    return {
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": torch.linspace(-4, 1, HV).to(dtype) if bias else None,
    }


def raw_betas(case: Case, dtype: torch.dtype = torch.float32, doubled: bool = False) -> dict[str, Any]:
    case.beta = torch.randn(case.beta.shape, generator=torch.Generator().manual_seed(8)).mul(3).to(dtype)
    return {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": doubled}


RAW: dict[str, Callable[..., dict[str, Any]]] = {
    "gates without a bias": partial(raw_gates, bias=False),
    "gates": raw_gates,
    "betas": raw_betas,
    "doubled betas": partial(raw_betas, doubled=True),
}


@pytest.mark.sweep(8)
@each_op("chunked")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("raw", RAW)
def test_gates_in_the_kernel(device: torch.device, op: str, dtype: torch.dtype, raw: str) -> None:
    case = make_case(70, H=1, HV=3)
    options = RAW[raw](case, dtype)
    assert_exact(op, case, run(op, case, device, **options), **options)


@each_op("chunked", "recurrent")
def test_raw_gates_and_betas_of_strided_views(device: torch.device, op: str) -> None:
    """Gates and betas are halves of one projection of packed sequences. A_log and dt_bias have strides too."""
    case = make_case(70, HV=3, cu_seqlens=[0, 3, 3, 70])
    options = raw_gates(case, torch.bfloat16) | raw_betas(case, torch.bfloat16)
    stacked = {name: torch.stack([options[name], options[name] + 1], -1) for name in ("A_log", "dt_bias")}
    strided = {name: x.to(device)[:, 0] for name, x in stacked.items()}
    on_device = case.to(device)
    fused = torch.cat([case.g, case.beta], -1).to(device)
    on_device.g, on_device.beta = fused.split(3, -1)
    assert not on_device.g.is_contiguous() and not strided["A_log"].is_contiguous()
    assert_exact(op, case, run(op, on_device, device, **(options | strided)), **options)


def test_a_gate_is_within_2_ulp_of_float64(device: torch.device) -> None:
    """With one token, K = V = 1, S = 1 and no update, o is exp(g). As g = -softplus(x), o is 1 - sigmoid(x)."""
    x = torch.linspace(-30, 30, 1001)
    zeros = torch.zeros(1, 1, 1001, 1)
    o, _ = torch_gdn.fused_recurrent_gated_delta_rule(
        torch.ones(1, 1, 1001, 1, device=device),
        zeros.to(device),
        zeros.to(device),
        x[None, None].to(device),
        initial_state=torch.ones(1, 1001, 1, 1, device=device),
        use_gate_in_kernel=True,
        A_log=torch.zeros(1001, device=device),
    )
    exact = torch.sigmoid(-x.double())
    g = torch.nn.functional.softplus(x.double())
    error = ((o.cpu().double().flatten() - exact) / exact).abs()
    assert (error <= 2.4e-7 * (1 + g)).all(), error.max()  # an error of one ulp in g is one of g ulps in exp(g)


def test_a_large_raw_gate_does_not_overflow(device: torch.device) -> None:
    """exp(x) overflows even in f64. A slow head, exp(A_log) = e^-9, must still remember."""
    x = torch.tensor([90.0, 800.0, 8000.0])
    ones, zeros = torch.ones(1, 1, 3, 1, device=device), torch.zeros(1, 1, 3, 1, device=device)
    o, _ = torch_gdn.fused_recurrent_gated_delta_rule(
        ones,
        zeros,
        zeros,
        x[None, None].to(device),
        initial_state=torch.ones(1, 3, 1, 1, device=device),
        use_gate_in_kernel=True,
        A_log=torch.full((3,), -9.0, device=device),
    )
    exact = (-x.double() * math.exp(-9.0)).exp()
    torch.testing.assert_close(o.cpu().double().flatten(), exact, rtol=2e-6, atol=0)


@each_op("chunked")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_initial_state_of_16_bits(device: torch.device, op: str, dtype: torch.dtype) -> None:
    case = make_case(20)
    assert case.initial_state is not None
    case.initial_state = case.initial_state.to(dtype)
    assert_exact(op, case, run(op, case, device))
    empty = make_case(0)
    empty.initial_state = case.initial_state
    assert_same_bits("final_state", run(op, empty, device)[1], case.initial_state.float())


@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_an_initial_state_in_float64_on_the_cpu(op: str) -> None:
    case = make_case(20)
    assert case.initial_state is not None
    case.initial_state = case.initial_state.double()
    assert_exact(op, case, run(op, case, torch.device("cpu")))


@each_op("chunked", "recurrent")
@pytest.mark.parametrize(("H", "HV"), [(2, 6), (3, 3), (1, 4)])
def test_tiled_heads(device: torch.device, op: str, H: int, HV: int) -> None:
    case = make_case(70, 32, 16, H=H, HV=HV)
    result = run(op, case, device, head_grouping="tiled")
    assert_exact(op, case, result, head_grouping="tiled")
    if (H, HV) == (2, 6):
        assert not torch.allclose(result[0], run(op, case, device)[0], atol=0.1)


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float32_output(device: torch.device, op: str, dtype: torch.dtype) -> None:
    case = make_case(70, dtype=dtype)
    options = {"output_dtype": torch.float32}
    assert_exact(op, case, run(op, case, device, **options), **options)


@each_op("chunked")
def test_a_float32_output_holds_what_float16_cannot(device: torch.device, op: str) -> None:
    case = make_case(20, dtype=torch.float16)
    assert case.initial_state is not None
    case.initial_state = case.initial_state * 1e6
    options = {"output_dtype": torch.float32}
    result = run(op, case, device, **options)
    assert result[0].abs().max() > 65504
    assert_exact(op, case, result, **options)


@pytest.mark.parametrize("names", [("gk",), ("gv",), ("gk", "gv")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decays_of_channels(device: torch.device, names: tuple[str, ...], dtype: torch.dtype) -> None:
    case = make_case(20, 40, 36, H=1, HV=2, dtype=dtype)
    options = {name: x.to(dtype) for name, x in channels_of(case).items() if name in names}
    assert_exact(RECURRENT, case, run(RECURRENT, case, device, **options), **options)


def test_a_reset_of_one_channel_leaves_no_trace_of_a_large_state(device: torch.device) -> None:
    case = make_case(10, 40, 36)
    assert case.initial_state is not None
    options = channels_of(case)
    case.initial_state[:, :, 3], case.initial_state[..., 5] = 1e4, 1e4
    options["gk"][:, 0, :, 3], options["gv"][:, 0, :, 5] = -torch.inf, -20.0
    assert_exact(RECURRENT, case, run(RECURRENT, case, device, **options), **options)


def test_a_beta_for_each_column(device: torch.device) -> None:
    case = make_case(20, 40, 36, H=1, HV=2)
    case.beta = torch.rand(1, 20, 2, 36)
    assert_exact(RECURRENT, case, run(RECURRENT, case, device))
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    assert_exact(RECURRENT, case, run(RECURRENT, case, device, **options), **options)


def test_views_of_channels(device: torch.device) -> None:
    """gk has the strides of [B, HV, T, K], and gv starts in the second column of a wider tensor."""
    case = make_case(20, 40, 36, B=2)
    options = channels_of(case)
    exact_options = dict(options)
    options["gk"] = options["gk"].transpose(1, 2).contiguous().to(device).transpose(1, 2)
    options["gv"] = torch.nn.functional.pad(options["gv"], (1, 2), value=torch.nan).to(device)[..., 1:-2]
    assert_exact(RECURRENT, case, run(RECURRENT, case, device, **options), **exact_options)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
@pytest.mark.parametrize(
    ("device", "normalise", "dispatches"),
    [("mps", True, 1), ("mps-recurrent", True, 1), ("mps-chunked", False, 3)],
    indirect=["device"],
)
def test_raw_gates_cost_a_prefill_no_dispatch(device: torch.device, normalise: bool, dispatches: int) -> None:
    """No conversion is launched. Only the chunked algorithm launches kernels for the norm of q and k."""
    case = make_case(70, 64, 32, H=1, HV=2, dtype=torch.bfloat16, normal=False)
    options = raw_gates(case, torch.bfloat16) | raw_betas(case, torch.bfloat16) | {"use_qk_l2norm_in_kernel": normalise}
    on_device = case.to(device)
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    with profiled() as profile:
        torch_gdn.chunk_gated_delta_rule(*on_device.qkv, **(on_device.options | options))
    assert sum(figures.dispatches for figures in profile.kernels.values()) == dispatches and not profile.fallbacks
