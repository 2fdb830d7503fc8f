"""Compares the gradients of the delta rules with autograd through the float64 recurrence, per tensor and per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import profiled, ready
from tests.helpers.errors import assert_close, assert_same_bits, chunk_f32, relative_error
from tests.helpers.gradients import (
    HEADS,
    PER_TOKEN,
    RULES,
    assert_exact_gradients,
    check,
    draw_call,
    draw_outer,
    exact_of,
    gradients_of,
    largest_g_cumsum,
    load,
    recorded,
)
from tests.helpers.prefill import each_device
from torch_gdn import reference
from torch_gdn_check.registry.drawing import drawing
from torch_gdn_check.registry.inputs import Call, to_device

pytestmark = pytest.mark.sweep(6)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
AS_FAR_AS_FLA = 1.3
WALKS = ("chunk_bwd_h", "chunk_gated_delta_rule_bwd_dhu")
each_rule = pytest.mark.parametrize("rule", RULES)


@each_rule
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_final_gates(device: torch.device, rule: str, dtype: torch.dtype) -> None:
    check(rule, draw_call(rule, 70, 64, 32, dtype=dtype), device)


@each_rule
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_raw_gates(device: torch.device, rule: str, dtype: torch.dtype) -> None:
    """The parameters of the gates and the norm of q and k have gradients too."""
    check(rule, draw_call(rule, 70, 64, 32, raw=True, dtype=dtype), device)


def test_a_bounded_gate(device: torch.device) -> None:
    check("chunk_kda", draw_call("chunk_kda", 40, raw=True) | {"lower_bound": -5.0}, device)


@each_rule
@each_device("chunked", "recurrent")
def test_log_decays_above_0_let_a_state_grow(device: torch.device, rule: str) -> None:
    """No algorithm clamps them, nor do the gradients."""
    call = draw_call(rule, 70, B=1, H=1, HV=2)
    call["g"] = call["g"].uniform_(-1.5, 2)
    op, exact_op = RULES[rule]
    result = op(**to_device(call, device), output_final_state=True)
    exact = exact_op(**{name: x.double() for name, x in call.items()}, output_final_state=True)
    for name, x, y in zip(("o", "final_state"), result, exact, strict=True):
        assert y.abs().max() > 1e3
        assert_close(name, x, y, chunk_f32(4 * largest_g_cumsum(call)))
    check(rule, call, device, growth=4)


@each_rule
@pytest.mark.parametrize("T", [1, 31, 32, 33, 63, 64, 65])
def test_lengths_around_a_chunk(device: torch.device, rule: str, T: int) -> None:
    check(rule, draw_call(rule, T, B=1), device)


@each_rule
def test_lengths_around_a_segment(rule: str) -> None:
    """The states of earlier segments are computed again: 64 chunks of 32 tokens, and two of these and a token."""
    for T in (2048, 4097):
        check(rule, draw_call(rule, T, 16, 16, B=1, H=1, HV=1), torch.device("cpu"))


@pytest.mark.sweep(1, seeds=3)
@each_rule
def test_segments_on_mps(rule: str) -> None:
    """With 64 heads, a segment of the 8 cores has 3 chunks of 16 tokens. Sequences end at its border and go on over it,
    one of them over three, and one without tokens is at the border.
    """
    device = ready("mps")
    call = draw_call(rule, 180, 16, 16, B=1, H=32, HV=64, cu_seqlens=[0, 48, 48, 170, 180])
    do, dht = draw_outer(call)
    with profiled() as profile:
        result = gradients_of(RULES[rule][0], call, do, dht, device)
    assert profile.launched("chunk_bwd_dqkwg_128") == 6, profile  # of 16 rows of chunks
    assert_exact_gradients(result, exact_of(rule, call, do, dht))
    alone = {name: x[:, 48:170] if name in ("q", "k", "v", "g", "beta") else x for name, x in call.items()}
    alone |= {"initial_state": call["initial_state"][2:3], "cu_seqlens": torch.tensor([0, 122])}
    for name, x in gradients_of(RULES[rule][0], alone, do[:, 48:170], dht[2:3], device).items():
        assert_same_bits(name, x, result[name][2:3] if name == "initial_state" else result[name][:, 48:170])


@pytest.mark.sweep(1, seeds=3)
@each_rule
def test_memory_on_mps_grows_by_the_token(rule: str) -> None:
    """By the gradients, and a state for each segment of 48 tokens, but not by the matrices of chunks."""
    device, allocated = ready("mps"), []
    for T in (96, 96, 192):  # the first call also allocates what the device keeps
        call = draw_call(rule, T, 16, 16, B=1, H=64, HV=64)
        moved = to_device({name: call[name] for name in PER_TOKEN}, device)
        do = torch.ones_like(moved["v"])
        with profiled() as profile:
            result = getattr(torch.ops.gdn, f"{rule}_bwd")(**moved, do=do)
        allocated.append(profile.allocated_bytes)
    gradients = sum(x.nbytes for x in result) // 2
    states = 2 * 64 * 16 * 32 * 4  # V is a whole slice of 32
    assert gradients < allocated[2] - allocated[1] <= 1.02 * (gradients + states)


@pytest.mark.sweep(8)
@each_rule
@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 96), (128, 128), (256, 256), (1, 1), (33, 65), (60, 100)])
def test_sizes_of_heads(device: torch.device, rule: str, K: int, V: int) -> None:
    H, HV = (1, 2) if K == 1 else (4, 8)  # the only number of a head may be a small difference
    check(rule, draw_call(rule, 40, K, V, B=1, H=H, HV=HV), device)


@each_rule
def test_columns_that_a_threadgroup_walks(rule: str) -> None:
    """All 128 of a head if each of the 8 cores gets a head, otherwise fewer. The bits are the same."""
    device, bits = ready("mps"), {}
    call = draw_call(rule, 40, 32, 128, B=1, H=8, HV=8)
    do, dht = draw_outer(call)
    for heads, threads in ((8, 512), (4, 256), (2, 128)):
        fewer = {name: x.narrow(HEADS.get(name, 2), 0, heads) for name, x in call.items()}
        with profiled() as profile:
            result = gradients_of(RULES[rule][0], fewer, do[:, :, :heads], dht[:, :heads], device)
        assert all(profile.launched(f"{walk}_32_{threads}") for walk in WALKS), profile
        for name, x in result.items():
            assert_same_bits(name, x, bits.setdefault(name, x).narrow(HEADS.get(name, 2), 0, heads))


@each_rule
def test_a_scale_of_zero(device: torch.device, rule: str) -> None:
    call = draw_call(rule, 40, raw=True) | {"scale": 0.0}
    do, dht = draw_outer(call)
    result = gradients_of(RULES[rule][0], call, do, dht, device)
    assert not result.pop("q").any()
    assert_exact_gradients(result, exact_of(rule, call, do, dht), 32 + largest_g_cumsum(call))


@each_rule
def test_packed_sequences(device: torch.device, rule: str) -> None:
    """One is empty, and its state's gradient is that of the final state."""
    check(rule, draw_call(rule, 100, B=1, cu_seqlens=[0, 33, 33, 34, 100]), device)


@each_rule
def test_options(device: torch.device, rule: str) -> None:
    call = draw_call(rule, 40, 32, 48) | {"scale": 0.3, "head_grouping": "tiled", "state_v_first": True}
    call["initial_state"] = call["initial_state"].transpose(-1, -2).contiguous()
    do, dht = draw_outer(call)
    result = gradients_of(RULES[rule][0], call, do, dht, device)
    exact = exact_of(rule, tiled_by_hand(call), do, dht)
    for name in ("q", "k"):  # of each value head; those of one key head are apart
        exact[name] = exact[name].unflatten(2, (2, 2)).sum(2)
    assert_exact_gradients(result, exact)


def tiled_by_hand(call: dict[str, Any]) -> dict[str, Any]:
    """Repeats q and k for each value head, because the recurrence of channels knows no other grouping."""
    repeated = {name: call[name].repeat(1, 1, 2, 1) for name in ("q", "k")}
    return {name: x for name, x in call.items() if name != "head_grouping"} | repeated


@each_rule
def test_values_of_another_dtype(device: torch.device, rule: str) -> None:
    """q and k of bfloat16, v of float32, g and beta of float16, a state of float64."""
    call = draw_call(rule, 40, dtype=BF16)
    call |= {"v": call["v"].float(), "g": call["g"].half(), "beta": call["beta"].half()}
    if device.type == "cpu":
        call["initial_state"] = call["initial_state"].double()
    do, dht = draw_outer(call)
    result = gradients_of(RULES[rule][0], call, do, dht.float(), device)
    result["initial_state"] = result["initial_state"].float()
    assert_exact_gradients(result, exact_of(rule, call, do, dht))


@each_rule
def test_output_of_float32(device: torch.device, rule: str) -> None:
    """The gradient of o then has digits that the values' dtype does not."""
    call = draw_call(rule, 40, dtype=F16) | {"output_dtype": F32}
    do, dht = draw_outer(call | {"v": call["v"].float()})
    assert_exact_gradients(gradients_of(RULES[rule][0], call, do, dht, device), exact_of(rule, call, do, dht))


@each_rule
def test_repeated_keys_at_a_beta_of_two(device: torch.device, rule: str) -> None:
    """No update decays, and each reverses the last one."""
    call = draw_call(rule, 65, 64, 64, B=1, beta=2.0, same_keys=True)
    check(rule, call, device, growth=2)


@each_rule
@pytest.mark.parametrize("strength", [0.7, 3.0, 200.0])
def test_strong_decay(device: torch.device, rule: str, strength: float) -> None:
    """The state loses 20 decades in a chunk, 40 in 32 tokens, or everything at once; dg is then the least of it."""
    call = draw_call(rule, 65, 64, 32, B=1)
    call["g"] = torch.full_like(call["g"], -strength)
    do, dht = draw_outer(call)
    result = gradients_of(RULES[rule][0], call, do, dht, device)
    exact = exact_of(rule, call, do, dht)
    if strength == 200:  # what is left of the states is denormal in float32
        for name in ("g", "initial_state"):
            assert result[name].abs().max() < 1e-30 and exact.pop(name).abs().max() < 1e-30
            del result[name]
    assert_exact_gradients(result, exact, largest_g_cumsum(call))


@each_rule
def test_a_reset_in_the_middle(device: torch.device, rule: str) -> None:
    """A log decay of minus infinity."""
    call = draw_call(rule, 40, B=1)
    call["g"][:, 20] = -torch.inf
    check(rule, call, device)


@each_rule
def test_saturated_raw_gates(device: torch.device, rule: str) -> None:
    call = draw_call(rule, 40, raw=True, B=1)
    call["g"][:, ::3], call["g"][:, 1::3] = 60.0, -60.0
    call["beta"][:, ::2] = 40.0
    check(rule, call, device)


@each_rule
def test_a_sequence_has_the_same_bits_alone(device: torch.device, rule: str) -> None:
    call = draw_call(rule, 60, B=1, cu_seqlens=[0, 23, 60])
    do, dht = draw_outer(call)
    together = gradients_of(RULES[rule][0], call, do, dht, device)
    alone = {name: x[:, 23:] if name in ("q", "k", "v", "g", "beta") else x for name, x in call.items()}
    alone |= {"initial_state": call["initial_state"][1:], "cu_seqlens": torch.tensor([0, 37])}
    for name, x in gradients_of(RULES[rule][0], alone, do[:, 23:], dht[1:], device).items():
        assert_same_bits(name, x, together[name][1:] if name == "initial_state" else together[name][:, 23:])


@pytest.mark.parametrize("case", recorded(), ids=lambda case: case["name"])
def test_as_exact_as_fla(device: torch.device, case: dict[str, Any]) -> None:
    """In one case FLA is wrong. There, float32's error and one rounding are the bound."""
    call, do, dht = load(case["name"])
    rule = "chunk_kda" if call["g"].dim() == 4 else "chunk_gated_delta_rule"
    result = gradients_of(RULES[rule][0], call, do, dht, device)
    exact = exact_of(rule, call, do, dht)
    for name, x in result.items():
        theirs = case["fla_error"][f"d{name}"]
        bound = AS_FAR_AS_FLA * min(theirs, 4.5e-3)
        assert relative_error(x.cpu().double(), exact[name]) <= bound, name


@each_rule
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3, "use_qk_l2norm_in_kernel": True, "head_grouping": "tiled"},
        {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "state_v_first": True},
    ],
    ids=["plain", "options", "packed"],
)
def test_the_reference(rule: str, options: Call) -> None:
    """In float64 it has the numerical derivatives of the recurrence. Packed sequences keep all their states."""
    packed = {} if "cu_seqlens" not in options else {"B": 1, "cu_seqlens": options["cu_seqlens"].tolist()}
    call = {name: x.double() for name, x in draw_call(rule, 5, 3, 3, **packed).items() if name != "cu_seqlens"}
    do, dht = (x.double() for x in draw_outer(call))
    result = getattr(reference, f"{rule}_bwd")(**call, do=do, dht=dht, **options)

    def loss(moved: Call) -> Tensor:
        o, state = RULES[rule][1](**moved, **options, output_final_state=True)
        return (o * do).sum() + (state * dht).sum()

    for name, gradient in zip((*PER_TOKEN, "initial_state"), result, strict=True):
        with drawing(3):
            step = 1e-5 * torch.randn_like(call[name])
        difference = loss(call | {name: call[name] + step}) - loss(call | {name: call[name] - step})
        assert relative_error((gradient * step).sum(), difference / 2) < 1e-7, name


def test_recurrent_functions_run_the_chunked_rule(device: torch.device) -> None:
    for rule, recurrent in (
        ("chunk_gated_delta_rule", torch_gdn.fused_recurrent_gated_delta_rule),
        ("chunk_kda", torch_gdn.fused_recurrent_kda),
    ):
        call = draw_call(rule, 40, raw=True)
        outer = draw_outer(call)
        expected = gradients_of(RULES[rule][0], call, *outer, device)
        for name, x in gradients_of(recurrent, call, *outer, device).items():
            assert_same_bits(name, x, expected[name])
