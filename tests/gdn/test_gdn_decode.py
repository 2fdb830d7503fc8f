from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.entries import assert_exact
from tests.helpers.errors import assert_same_bits
from torch_gdn_check.registry import REGISTRY, bounds
from torch_gdn_check.registry.decode import POINTS, DecodePoint
from torch_gdn_check.registry.inputs import to_device

ENTRY = REGISTRY["gdn_decode_"]
KERNELS = ("causal_conv1d_update", "gdn_decode")
Call = dict[str, Any]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_equals_the_reference(device: torch.device, point: DecodePoint) -> None:
    """The call takes two launches, and a third to search more than 32 indices."""
    call = ENTRY.call(point)
    on_device = to_device(call, device)
    with kernels_run(device, *(("locate_slots",) if point.batch > 32 else ()), *KERNELS):
        o = torch.ops.gdn.gdn_decode_(**on_device)
    parts = ENTRY.compared(point, call, {name: x.cpu() for name, x in ENTRY.outputs(on_device, o).items()})
    assert bounds.worst(parts).kept, str(bounds.worst(parts))


def test_sequences_without_indices_have_the_slots_in_order(device: torch.device) -> None:
    point = DecodePoint(K=16, V=8, H=1, HV=1, tokens=7, packed=True)
    call = ENTRY.call(point) | {"state_indices": None, "has_initial_state": None}
    assert_exact(ENTRY, point, call, device)


def in_three_ops(call: Call) -> Tensor:
    """Computes the same with separate ops, for projections that are not grouped by key head."""
    call = dict(call)
    HV, V = call["A_log"].shape[0], call["norm_weight"].shape[0]
    K = call["state_pool"].shape[3 if call["state_v_first"] else 2]
    H = (call["conv_weight"].shape[0] - HV * V) // (2 * K)
    indices, cu_seqlens, accepted = call["state_indices"], call.get("cu_seqlens"), call.get("num_accepted_tokens")
    flags, null = call["has_initial_state"], call["null_index"]
    sequence_slots = indices[:, 0] if indices.dim() == 2 else indices
    mixed = torch_gdn.causal_conv1d_update_(
        call["qkv"], call["conv_weight"], call["conv_pool"], sequence_slots, flags, null, call["conv_bias"], "silu",
        cu_seqlens=cu_seqlens, num_accepted_tokens=accepted,
    )  # fmt: skip
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    o = torch_gdn.fused_recurrent_gated_delta_rule_(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), call["a"], call["b"],
        call["state_pool"], indices, flags, null, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=call["A_log"], dt_bias=call["dt_bias"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        state_v_first=call["state_v_first"], cu_seqlens=cu_seqlens, num_accepted_tokens=accepted,
    )  # fmt: skip
    z = call["z"].unflatten(-1, (HV, V))
    return torch.ops.gdn.rms_norm_gated(
        o, z, call["norm_weight"], call["norm_activation"], call["norm_eps"], call["round_norm"]
    )


def by_key_head(call: Call, H: int, K: int) -> Call:
    """Returns the call with its projections in Qwen3-Next's order, as columns of wider tensors."""
    q, k, v = call["qkv"].split([H * K, H * K, call["z"].shape[-1]], -1)
    parts = [x.unflatten(-1, (H, -1)) for x in (q, k, v, call["z"], call["b"], call["a"])]
    wide = [torch.cat(x, -1).flatten(2).repeat(1, 1, 2) for x in (parts[:4], parts[4:])]
    qkvz, ba = (x[..., : x.shape[-1] // 2] for x in wide)
    return call | {"qkv": qkvz, "b": ba, "z": None, "a": None}


def in_pages(pool: Tensor) -> Tensor:
    """Returns the same pool with gaps between the slots."""
    storage = torch.cat((pool.flatten(1), pool.flatten(1)[:, :8]), 1)
    return storage[:, :-8].unflatten(1, pool.shape[1:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_goes_on_after_accepted_tokens(device: torch.device, pool: torch.dtype, interleaved: bool) -> None:
    """Sequences have 3, 2, 1 and 2 tokens, and a slot for each state. The second has no slot, and the third starts
    anew.
    """
    point = DecodePoint(K=64, V=48, tokens=8, batch=1, pool=pool, state_v_first=interleaved)
    call = ENTRY.call(point) | {"norm_activation": "sigmoid", "norm_eps": 1e-3, "round_norm": False}
    call |= {"conv_pool": in_pages(torch.randn(12, 2 * 2 * 64 + 4 * 48, 5)), "null_index": 0, "allow_neg_eigval": True}
    sizes = (48, 64) if interleaved else (64, 48)
    call |= {"state_pool": in_pages(torch.randn(12, 4, *sizes).to(pool)), "cu_seqlens": torch.tensor([0, 3, 5, 6, 8])}
    call["state_indices"] = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 5, 6], [9, 8, 0]])
    call |= {"has_initial_state": torch.tensor([True, True, False, True])}
    call["num_accepted_tokens"] = torch.tensor([3, 1, 1, 2], dtype=torch.int32)
    expected, result = to_device(call, device), to_device(call, device)
    o = in_three_ops(expected)
    result |= {"out": torch.full_like(o, torch.nan)}
    torch_gdn.gdn_decode_(**(by_key_head(result, 2, 64) if interleaved else result))
    assert torch.equal(result["conv_pool"], expected["conv_pool"])
    assert torch.equal(result["state_pool"], expected["state_pool"])
    assert not torch.equal(expected["state_pool"].cpu(), call["state_pool"])
    assert (result["out"][:, 3:5] == 0).all()
    assert bounds.relative_error(result["out"].cpu().double(), o.cpu().double()) < 4e-7


@pytest.mark.parametrize("v_first", [False, True])
def test_one_token_has_the_bits_of_packed_sequences(device: torch.device, v_first: bool) -> None:
    """On `mps`, packed sequences run a loop over tokens."""
    call = ENTRY.call(DecodePoint(torch.bfloat16, K=64, V=48, batch=4, state_v_first=v_first))
    packed = {name: call[name].transpose(0, 1) for name in ("qkv", "z", "b", "a")}
    result, expected = to_device(call, device), to_device(call | packed | {"cu_seqlens": torch.arange(5)}, device)
    o, expected_o = (torch_gdn.gdn_decode_(**each) for each in (result, expected))
    assert_same_bits("o", o.cpu(), expected_o.cpu().transpose(0, 1))
    assert_same_bits("states", result["state_pool"].cpu(), expected["state_pool"].cpu())
    assert not torch.equal(result["state_pool"].cpu(), call["state_pool"])


@pytest.mark.parametrize("round_norm", [False, True])
def test_is_no_further_than_the_three_ops(device: torch.device, round_norm: bool) -> None:
    call = ENTRY.call(DecodePoint(torch.bfloat16, batch=8)) | {"round_norm": round_norm, "null_index": -1}
    call |= {"allow_neg_eigval": True, "norm_activation": "silu", "norm_eps": 1e-6}
    exact = ENTRY.exact_outputs(call | {"round_norm": False})["o"]
    one = torch_gdn.gdn_decode_(**to_device(call, device))
    three = in_three_ops(to_device(call, device))
    errors = [bounds.relative_error(x.cpu().double(), exact) for x in (one, three)]
    assert errors[0] <= 1.01 * errors[1] and errors[1] < 1e-2
