"""Tests the stages of the gradients as ops: each equals its reference, and a chain of all is the whole gradient."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.entries import assert_exact
from tests.helpers.errors import assert_close, assert_same_bits, chunk_f32
from tests.helpers.gradients import exact_of
from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.gdn import RulePoint
from torch_gdn_check.registry.inputs import Call, doubled, to_device
from torch_gdn_check.registry.models import MODEL_SIZES

pytestmark = pytest.mark.sweep(8)

OPS = ("chunk_bwd_dv_local", "chunk_gated_delta_rule_bwd_dhu", "prepare_wy_repr_bwd", "chunk_bwd_dqkwg")
POINT = RulePoint(K=64, V=64, tokens=40, H=2, HV=4)
PACKED = replace(POINT, tokens=84, boundaries=(0, 17, 17, 20, 84))
POINTS = [*(replace(POINT, tokens=T, batch=2) for T in (1, 15, 16, 17, 70)), PACKED]
POINTS += [replace(POINT, K=K, V=V) for K, V in (*MODEL_SIZES, (1, 1), (33, 65), (60, 100))]
each_op = pytest.mark.parametrize("op", OPS)


def run(op: str, call: Call, device: torch.device) -> dict[str, Tensor]:
    entry, on_device = REGISTRY[op], to_device(call, device)
    with kernels_run(device, op):
        return entry.outputs(on_device, entry.run(on_device))


@each_op
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_equals_the_reference(device: torch.device, op: str, point: RulePoint) -> None:
    with kernels_run(device, op):
        assert_exact(REGISTRY[op], point, REGISTRY[op].call(point), device)


@each_op
def test_without_g_nothing_decays(device: torch.device, op: str) -> None:
    call = to_device(REGISTRY[op].call(POINT), device)
    del call["g"]
    results = getattr(torch_gdn, op)(**call)
    expected = getattr(torch.ops.gdn, op)(**call, g=torch.zeros(1, 40, 4, device=device))
    pairs = [(results, expected)] if isinstance(results, Tensor) else zip(results, expected, strict=True)
    for x, y in pairs:
        assert_same_bits(op, x, y)


def test_rows_without_a_chunk_are_zero_and_states_without_tokens_pass(device: torch.device) -> None:
    op = "chunk_gated_delta_rule_bwd_dhu"
    call = REGISTRY[op].call(PACKED) | {"chunk_indices": None}
    assert_exact(REGISTRY[op], PACKED, call, device)
    result = run(op, call, device)
    assert torch.equal(result["dh"][:, 7:].cpu(), torch.zeros(1, 3, 4, 64, 64))
    assert_same_bits("dh0", result["dh0"][1], call["dht"][1])


# ---- all stages ------------------------------------------------------------------------------------------------------


def chained(ops: ModuleType, x: Call, do: Tensor, dht: Tensor, **packed: Any) -> dict[str, Tensor]:
    """Returns the gradients of a rule's inputs, from its forward stages and those of its gradients."""
    q, k, v, beta, state = (x[name] for name in ("q", "k", "v", "beta", "initial_state"))
    g = ops.chunk_local_cumsum(x["g"], 16, **packed)
    A = ops.solve_tril(ops.chunk_scaled_dot_kkt(k, g, beta, chunk_size=16, **packed), **packed)
    w, u = ops.recompute_w_u(k, v, beta, A, g, **packed)
    h, v_new, _ = ops.chunk_fwd_h(k, w, u, g, initial_state=state, chunk_size=16, **packed)
    dv = ops.chunk_bwd_dv_local(q, k, do, g, scale=0.3, **packed)
    dh, dh0, dv = ops.chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, h0=state, dht=dht, scale=0.3, **packed)
    dq, dk, dw, dg = ops.chunk_bwd_dqkwg(q, k, v_new, do, h, dh, dv=dv, g=g, scale=0.3, **packed)
    more_dk, dv, dbeta, more_dg = ops.prepare_wy_repr_bwd(k, v, beta, dw, dv, g, **packed)
    return {"q": dq, "k": dk + more_dk, "v": dv, "g": dg + more_dg, "beta": dbeta, "initial_state": dh0}


@pytest.mark.parametrize("point", [replace(POINT, tokens=70, batch=2), PACKED], ids=["batch", "packed"])
def test_a_chain_is_the_whole_gradient(device: torch.device, point: RulePoint) -> None:
    case = point.case()
    call = {name: x for name, x in vars(case).items() if x is not None}
    do, dht = torch.randn(case.v.shape), torch.randn(case.initial_state.shape)
    packed = {} if case.cu_seqlens is None else {"cu_seqlens": case.cu_seqlens}
    exact = exact_of("chunk_gated_delta_rule", call | {"scale": 0.3}, do, dht)
    wide = {name: doubled(x) for name, x in call.items()}
    for name, x in chained(reference, wide, do.double(), dht.double(), **packed).items():
        assert_close(name, x, exact[name], 1e-12, 1 if name == "initial_state" else 2)
    moved = to_device(call | {"do": do, "dht": dht}, device)
    whole = torch.ops.gdn.chunk_gated_delta_rule_bwd(**moved, scale=0.3)
    ours = chained(torch_gdn, moved, moved["do"], moved["dht"], **packed)
    for (name, x), of_whole in zip(ours.items(), whole, strict=True):
        head_dim = 1 if name == "initial_state" else 2
        assert_close(name, x, exact[name], chunk_f32(case.largest_g_cumsum(16)), head_dim)
        assert_close(name, x, of_whole.cpu().double(), chunk_f32(case.largest_g_cumsum(16)), head_dim)
