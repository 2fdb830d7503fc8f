"""Tests moe_logits, moe_router, moe_gate_up and moe_down: float64, wrong ids, bits without other tokens' influence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import launched, on_a_mac, ready
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn_check.registry.experts import OF_TOKENS, ExpertPoint, draw_down, draw_gate_up, draw_logits
from torch_gdn_check.registry.inputs import Call, doubled, to_device

BOUND = {torch.float32: 6e-7, torch.bfloat16: 1.8e-3, torch.float16: 2.2e-4}


def widened(call: Call) -> Call:
    return {name: doubled(x) for name, x in call.items()}


# ---- the router ------------------------------------------------------------------------------------------------------


def route(device: torch.device, logits: Tensor, top_k: int, **options: object) -> tuple[Tensor, Tensor]:
    bias = options.pop("correction_bias", None)
    on_device = bias.to(device) if isinstance(bias, Tensor) else None
    weights, ids = launched(
        device, "moe_router", torch.ops.gdn.moe_router, logits.to(device), top_k, correction_bias=on_device, **options
    )
    return weights.cpu(), ids.cpu()


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("experts", [1, 31, 64, 257, 1024])
def test_routes_as_float64_does(device: torch.device, dtype: torch.dtype, experts: int) -> None:
    logits, bias = torch.randn(7, experts).to(dtype), torch.randn(experts)
    for options in ({}, {"scoring": "sigmoid"}, {"renormalize": False, "correction_bias": bias}):
        weights, ids = route(device, logits, min(8, experts), routed_scaling_factor=2.5, **options)
        expected, expected_ids = reference.moe_router(
            logits.double(), min(8, experts), routed_scaling_factor=2.5, **widened(options)
        )
        assert torch.equal(ids, expected_ids)
        assert_close("weights", weights, expected, 6e-7, head_dim=0)


@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group"), [(64, 8, 3), (64, 32, 32), (64, 64 // 4, 1), (64, 2, 1), (32, 32, 20)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_groups(device: torch.device, experts: int, n_group: int, topk_group: int, biased: bool) -> None:
    logits = torch.randn(9, experts)
    options = {"scoring": "sigmoid", "n_group": n_group, "topk_group": topk_group}
    options |= {"correction_bias": torch.randn(experts)} if biased else {}
    weights, ids = route(device, logits, 4, **options)
    expected, expected_ids = reference.moe_router(logits.double(), 4, **widened(options))
    assert torch.equal(ids, expected_ids)
    assert_close("weights", weights, expected, 6e-7, head_dim=0)
    assert (ids // (experts // n_group)).unique(dim=1).shape[1] <= 4


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_id_is_chosen(device: torch.device, scoring: str) -> None:
    logits = torch.zeros(2, 100)
    logits[1, [70, 3, 40]] = 1.0
    weights, ids = route(device, logits, 4, scoring=scoring)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 40, 70, 0]]
    assert_close("weights", weights[:1], torch.full((1, 4), 0.25, dtype=torch.float64), 3e-7, head_dim=None)


def test_nan_and_infinities_leave_valid_ids(device: torch.device) -> None:
    logits = torch.randn(4, 40)
    logits[0, 7], logits[1, :], logits[2, 5], logits[3, :] = torch.nan, -torch.inf, torch.inf, torch.nan
    for scoring in ("softmax", "sigmoid"):
        _, ids = route(device, logits, 8, scoring=scoring)
        assert all(len(set(row)) == 8 and 0 <= min(row) <= max(row) < 40 for row in ids.tolist())


# ---- products with the matrices of experts, and of the router --------------------------------------------------------


OF_IDS = {"moe_gate_up": draw_gate_up, "moe_down": draw_down}
OPS = OF_IDS | {"moe_logits": draw_logits}


def tokens_of(call: Call, tokens: slice | Tensor) -> Call:
    return {name: x[tokens] if name in OF_TOKENS else x for name, x in call.items()}


def results(op: str, call: Call, device: torch.device) -> list[Tensor]:
    result = getattr(torch.ops.gdn, op)(**to_device(call, device))
    return [x.cpu() for x in (result if isinstance(result, tuple) else (result,))]


def assert_exact(op: str, call: Call, device: torch.device, bound: float) -> None:
    result = getattr(reference, op)(**widened(call))
    expected = result if isinstance(result, tuple) else (result,)
    for x, exact in zip(results(op, call, device), expected, strict=True):
        if exact is None:
            assert x.shape == (0,)
        else:
            assert_close(op, x, exact, bound, head_dim=None)


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("T", [0, 1, 8, 9, 70])
@pytest.mark.parametrize("op", OPS)
def test_equals_the_reference(device: torch.device, op: str, dtype: torch.dtype, T: int) -> None:
    odd = T == 8  # rows come in pairs, and the last one is alone
    point = ExpertPoint(dtype, T=max(T, 1), E=7, k=3, D=72 + odd, I=40 + odd, IS=20 if T % 2 else 0)
    assert_exact(op, tokens_of(OPS[op](point), slice(T)), device, BOUND[dtype])


@pytest.mark.parametrize(("T", "k"), [(2, 12), (30, 12), (8, 12), (89, 12), (1, 33), (1, 96)])
@pytest.mark.parametrize("op", OF_IDS)
def test_an_expert_may_be_chosen_by_all_and_twice(device: torch.device, op: str, T: int, k: int) -> None:
    call = OF_IDS[op](ExpertPoint(T=T, E=k, k=k, D=36, I=20))
    for ids in ([4, 4, 2], [4, 4, 4]):
        call["topk_ids"] = torch.tensor(ids * (k // 3)).expand(T, k)
        assert_exact(op, call, device, 6e-7)


@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("op", OF_IDS)
def test_wrong_ids(device: torch.device, op: str, T: int) -> None:
    """On `mps` wrong ids are reported, and their pairs omitted."""
    call = OF_IDS[op](ExpertPoint(T=T, E=6, k=2, D=36, I=20, IS=8))
    call["topk_ids"][-1] = torch.tensor([6, 1])
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"{op}: topk_ids: expected ids below the number of experts, got 6 for 6"):
            results(op, call, device)
        return
    if not on_a_mac():
        result = getattr(torch.ops.gdn, op)(**to_device(call, device))
        with pytest.raises(RuntimeError, match=rf"{op}: topk_ids: expected ids below .* got 6 at {2 * T - 2}"):
            torch.mps.synchronize()
        left_out = call | {"topk_ids": call["topk_ids"].where(call["topk_ids"] < 6, -1)}
        first = result[0] if isinstance(result, tuple) else result
        assert_same_bits(op, first.cpu(), results(op, left_out, device)[0])


@pytest.mark.parametrize("T", [8, 80])
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_other_tokens(op: str, T: int) -> None:
    """On `mps` this holds among calls for few tokens, and among calls for many. The sums of each token have their own
    order.
    """
    device = ready("mps")
    call = OPS[op](ExpertPoint(torch.bfloat16, T=T, E=4, k=3, D=72, I=40, IS=20))
    order = torch.randperm(T)[: 5 if T == 8 else 70]
    for whole, part in zip(results(op, call, device), results(op, tokens_of(call, order), device), strict=True):
        assert_same_bits(op, whole[order], part)


def test_bits_of_logits_do_not_depend_on_the_number_of_tokens() -> None:
    """On `mps` this holds for up to 64 tokens. All simdgroups have columns."""
    device = ready("mps")
    call = draw_logits(ExpertPoint(torch.bfloat16, T=64, E=10, D=1500))
    assert_exact("moe_logits", call, device, 6e-7)
    (whole,) = results("moe_logits", call, device)
    for T in (1, 2, 3, 8, 9):
        (part,) = results("moe_logits", tokens_of(call, slice(T)), device)
        assert_same_bits(f"{T} tokens", part, whole[:T])
