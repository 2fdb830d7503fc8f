"""Tests the six stages of a chunk: each equals the reference at every kind of point, and has its own cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.entries import assert_exact
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.cases import make_case
from torch_gdn_check.registry.gdn import STAGES, RulePoint, stage_points
from torch_gdn_check.registry.inputs import Call, columns_apart, to_device
from torch_gdn_check.registry.models import DTYPES
from torch_gdn_check.registry.stages import stages_of

POINT = RulePoint(K=64, V=64, tokens=70)
PACKED = replace(POINT, tokens=150, boundaries=(0, 17, 17, 81, 150))
POINTS = [
    *(replace(POINT, tokens=T, batch=2, H=2, HV=4, dtype=dtype) for dtype in DTYPES for T in (1, 130)),
    *(replace(POINT, tokens=T, chunk_size=C, HV=3) for T, C in ((7, 16), (50, 32), (63, 32), (64, 64), (200, 16))),
    PACKED,
]
SIZES = [*(replace(POINT, K=K, V=V) for K, V in ((60, 100), (256, 64), (96, 192))), *stage_points()]
UNSIZED = ("chunk_local_cumsum", "solve_tril")  # these have neither K nor V
EACH = [(op, point) for op in STAGES for point in (POINTS if op in UNSIZED else POINTS + SIZES)]
each_stage = pytest.mark.parametrize("op", STAGES)


def call_of(op: str, point: RulePoint = POINT) -> Call:
    return REGISTRY[op].call(point)


def run(device: torch.device, op: str, call: Call) -> list[Tensor]:
    entry, on_device = REGISTRY[op], to_device(call, device)
    with kernels_run(device, op):
        result = entry.outputs(on_device, entry.run(on_device))
    return [x.cpu() for x in result.values()]


def check(device: torch.device, op: str, call: Call, point: RulePoint = POINT) -> None:
    with kernels_run(device, op):
        assert_exact(REGISTRY[op], point, call, device)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("op", "point"), EACH, ids=[f"{op}-{point.name}" for op, point in EACH])
def test_equals_the_reference(device: torch.device, op: str, point: RulePoint) -> None:
    check(device, op, call_of(op, point), point)


@each_stage
def test_boundaries_of_32_bits(device: torch.device, op: str) -> None:
    call = call_of(op, PACKED)
    check(device, op, call | {name: call[name].int() for name in ("cu_seqlens", "chunk_indices")}, PACKED)


# ---- g_cumsum, A and its inverse -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_g_of_any_floating_dtype(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "mps" and dtype == torch.float64:
        pytest.skip("mps has no float64")
    call = call_of("chunk_local_cumsum")
    check(device, "chunk_local_cumsum", call | {"g": call["g"].to(dtype)})


def test_minus_infinity_counts_as_minus_104(device: torch.device) -> None:
    g = torch.zeros(1, 20, 1)
    g[0, 3], g[0, 5] = -torch.inf, -1e3
    expected = torch.zeros(1, 20, 1)
    expected[0, 3:] -= 104
    expected[0, 5:] -= 104
    (sums,) = run(device, "chunk_local_cumsum", {"g": g})
    assert torch.equal(sums, expected)


def test_everything_but_the_strictly_lower_part_is_zero(device: torch.device) -> None:
    call = call_of("chunk_scaled_dot_kkt", replace(POINT, tokens=80))
    (A,) = run(device, "chunk_scaled_dot_kkt", call)
    assert torch.equal(A == 0, reference.chunk_scaled_dot_kkt(**call | {"k": call["k"].double()}) == 0)


def test_growing_gates_do_not_overflow_above_the_diagonal(device: torch.device) -> None:
    """exp(g_i - g_j) for j > i would be infinite, and a mask of zeros would turn it into NaN."""
    call = call_of("chunk_scaled_dot_kkt", replace(POINT, tokens=64))
    g = -20.0 * torch.arange(1, 65)[None, :, None].expand_as(call["g"])
    check(device, "chunk_scaled_dot_kkt", call | {"g": g.contiguous()})


@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_the_inverse_for_repeated_keys(device: torch.device, beta: float) -> None:
    """Powers of A grow to 1e18, so a Neumann series in float32 fails. Substitution has an error of 1.6e-6."""
    case = make_case(128, beta=beta, same_keys=True)
    case.g = torch.zeros_like(case.g)
    A = stages_of(case).A
    (inverse,) = run(device, "solve_tril", {"A": A})
    assert_close("A_inv", inverse, reference.solve_tril(A.double()), 5e-6)


def test_the_inverse_reads_and_writes_its_chunk_alone(device: torch.device) -> None:
    A = call_of("solve_tril")["A"]
    rows = torch.arange(70)[:, None] % 64
    dirty = torch.where((torch.arange(64) >= rows)[None, :, None], torch.tensor(torch.nan), A)
    (inverse,), (expected,) = (run(device, "solve_tril", {"A": x}) for x in (dirty, A))
    assert torch.equal(inverse, expected)
    assert torch.equal(inverse[0, 64:, :, 6:], torch.zeros(6, 2, 58))


# ---- w, u, h and o ---------------------------------------------------------------------------------------------------


def test_w_and_u_do_not_read_A_past_the_end_of_a_short_chunk(device: torch.device) -> None:
    call = call_of("recompute_w_u")
    call["A"][:, 64:, :, 6:] = torch.nan
    assert all(x.isfinite().all() for x in run(device, "recompute_w_u", call))


@pytest.mark.parametrize("op", ["chunk_fwd_h", "chunk_gated_delta_rule_bwd_dhu"])
def test_a_walk_over_chunks_copies_inputs_once(op: str) -> None:
    def copies(tokens: int) -> int:
        entry = REGISTRY[op]
        call = entry.call(RulePoint(K=8, V=8, chunk_size=16, tokens=tokens))
        apart = {name: columns_apart(x) if isinstance(x, Tensor) and x.dim() == 4 else x for name, x in call.items()}
        with profile(activities=[ProfilerActivity.CPU]) as calls:
            entry.run(apart)
        return sum(each.count for each in calls.key_averages() if each.key == "aten::clone")

    assert copies(320) == copies(32) > 0


def test_h_from_nothing(device: torch.device) -> None:
    call = call_of("chunk_fwd_h", replace(POINT, tokens=130))
    check(device, "chunk_fwd_h", call | {"initial_state": None})
    results = torch_gdn.chunk_fwd_h(**to_device(call | {"output_final_state": False}, device))
    assert results[2] is None


def test_h_without_chunk_indices(device: torch.device) -> None:
    """h then has surplus rows, which are zeros as in the reference."""
    check(device, "chunk_fwd_h", call_of("chunk_fwd_h", PACKED) | {"chunk_indices": None}, PACKED)


@pytest.mark.parametrize(("op", "states"), [("chunk_fwd_h", "initial_state"), ("chunk_fwd_o", "h")])
def test_state_v_first(device: torch.device, op: str, states: str) -> None:
    call = call_of(op, replace(POINT, V=32, tokens=130))
    check(device, op, call | {states: call[states].transpose(-1, -2).contiguous(), "state_v_first": True})


def test_scale(device: torch.device) -> None:
    check(device, "chunk_fwd_o", call_of("chunk_fwd_o") | {"scale": 0.3})
