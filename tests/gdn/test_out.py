"""Tests `out`: the in-place ops write into the caller's buffer, with the bits and the zeros of a new tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.gdn.test_opcheck import opcheck
from tests.helpers.cases import make_case
from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.errors import assert_same_bits
from tests.helpers.prefill import each_device
from torch_gdn_check.registry import REGISTRY

OPS = [name for name, entry in REGISTRY.items() if {"state_pool", "out"} <= {*entry.written}]
each_way = pytest.mark.parametrize("op", OPS)


def call_of(op: str, device: torch.device, packed: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns a call whose last sequence has no slot, so that its rows are zeros."""
    return REGISTRY[op].smallest(device=device, packed=packed, dtype=dtype)


def copy_of(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}


def run(op: str, call: dict[str, Any]) -> Tensor:
    result = getattr(torch_gdn, op)(**call)
    assert isinstance(result, Tensor)
    return result


def room_for(o: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Returns a buffer, and a view of o's shape in it with other data around each row, token and batch row. Odd padding
    makes the view start at an odd element, where only single elements are aligned.
    """
    whole = torch.full((o.shape[0] + 1, o.shape[1] + 2, *o.shape[2:-1], o.shape[-1] + padding), 7.0).to(o)
    view = whole[1:, 1 : 1 + o.shape[1], ..., : o.shape[-1]]
    shift = padding % 2 * (1 - view.storage_offset() % 2)
    return whole, whole[1:, 1 : 1 + o.shape[1], ..., shift : shift + o.shape[-1]]


@pytest.mark.sweep(6)
@each_device("chunked", "fused_chunk", "recurrent")
@each_way
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(("padding", "dtype"), [(5, torch.bfloat16), (4, torch.float32)], ids=["odd", "vectors"])
def test_has_the_bits_of_a_new_tensor(
    device: torch.device, op: str, packed: bool, padding: int, dtype: torch.dtype
) -> None:
    call = call_of(op, device, packed, dtype)
    ours, expected = copy_of(call), run(op, call)
    whole, view = room_for(expected, padding)
    around = whole.clone()
    assert run(op, ours | {"out": view}) is view
    assert_same_bits("o", view, expected)
    without_slot = expected[:, 5:] if packed else expected[1:]
    assert expected.any() and not without_slot.any()
    assert_same_bits("pool", ours["state_pool"], call["state_pool"])
    around.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(expected)
    assert_same_bits("what lies around", whole, around)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("channels_first", [False, True])
def test_of_the_convolution_in_every_kernel(device: torch.device, tokens: int, channels_first: bool) -> None:
    """Few tokens run one kernel, more tokens another, and x whose tokens are neighbours a third."""
    x, weight, pool = torch.randn(2, tokens, 36), torch.randn(36, 4), torch.randn(2, 36, 4)
    if channels_first:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    mine, same, theirs = x.to(device), pool.to(device), pool.clone().to(device)
    expected = torch_gdn.causal_conv1d_update_(mine, weight.to(device), same)
    whole, view = room_for(expected, 3)
    torch_gdn.causal_conv1d_update_(mine, weight.to(device), theirs, out=view)
    assert_same_bits("y", view, expected)
    view.fill_(7.0)
    assert (whole == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_buffer_of_float32(device: torch.device, dtype: torch.dtype) -> None:
    """out may have output_dtype."""
    for op in OPS[:2]:
        call = call_of(op, device, False, dtype) | {"output_dtype": torch.float32}
        ours, expected = copy_of(call), run(op, call)
        _, view = room_for(expected, 5)
        assert_same_bits("o", run(op, ours | {"out": view}), expected)


def test_decodes_and_prefills_of_a_step_share_a_buffer(device: torch.device) -> None:
    """A step has 3 sequences of one token each, then 2 prompts: two calls, one buffer, no copy."""
    K, V, HV, T = 32, 16, 2, 50
    case = make_case(T, K, V, H=1, HV=HV).to(device)
    pool, o = torch.randn(6, HV, K, V, device=device), torch.full((1, T, HV, V), 7.0, device=device)
    same = pool.clone()
    inputs = [*case.qkv, case.g, case.beta]
    decodes, prefills = [x[:, :3] for x in inputs], [x[:, 3:] for x in inputs]
    first = {"state_indices": torch.tensor([4, 0, 5]), "cu_seqlens": torch.tensor([0, 1, 2, 3])}
    second = {"state_indices": torch.tensor([2, 1]), "cu_seqlens": torch.tensor([0, 20, 47])}
    torch_gdn.fused_recurrent_gated_delta_rule_(*decodes, pool, **first, out=o[:, :3])
    torch_gdn.chunk_gated_delta_rule_(*prefills, pool, **second, out=o[:, 3:])
    each = torch_gdn.fused_recurrent_gated_delta_rule_(*decodes, same, **first)
    rest = torch_gdn.chunk_gated_delta_rule_(*prefills, same, **second)
    assert_same_bits("o", o, torch.cat([each, rest], 1))
    assert_same_bits("pool", pool, same)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
@each_way
def test_nothing_is_allocated_or_copied(op: str) -> None:
    device = ready("mps")
    call = call_of(op, device, False)
    call |= {"state_indices": call["state_indices"].to(torch.int32)}
    _, view = room_for(run(op, copy_of(call)), 4)
    torch.mps.synchronize()
    with profiled() as without:
        run(op, copy_of(call))
    with profiled() as profile:
        run(op, copy_of(call) | {"out": view})
    assert {name: each.dispatches for name, each in profile.kernels.items()} == {
        name: each.dispatches for name, each in without.kernels.items()
    }
    assert profile.fallbacks == without.fallbacks
    assert profile.allocated_bytes < without.allocated_bytes


@each_way
@pytest.mark.sweep(6)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_opcheck(device: torch.device, op: str, packed: bool) -> None:
    call = REGISTRY[op].smallest(device=device, packed=packed)
    _, view = room_for(run(op, copy_of(call)), 4)
    opcheck(op, call | {"out": view}, device)


@pytest.mark.sweep(6)
@each_way
def test_fullgraph_gives_the_same_bits(device: torch.device, op: str) -> None:
    """This also holds for a part of a buffer that is read before and after."""
    torch._dynamo.reset()

    def step(buffer: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        before = buffer.sum()
        getattr(torch_gdn, op)(**call, out=buffer[:, 1:])
        return buffer * 2, before

    call = call_of(op, device, False)
    ours, expected = copy_of(call), run(op, copy_of(call))
    buffer = torch.ones(expected.shape[0], expected.shape[1] + 1, *expected.shape[2:], device=device)
    same = buffer.clone()
    doubled, before = torch.compile(step, fullgraph=True, backend="aot_eager")(buffer, ours)
    assert_same_bits("the buffer", buffer[:, 1:], expected)
    assert_same_bits("what is read after", doubled, buffer * 2)
    assert_same_bits("what is read before", before, same.sum())


def wrong_outs() -> list[Any]:
    changes = [
        ("a token too few", ValueError, "expected shape", lambda o: o[:, 1:]),
        ("a dimension more", ValueError, "expected shape", lambda o: o[None]),
        ("float64", TypeError, "expected dtype float32, got float16", lambda o: o.half()),
        ("a last stride of 2", ValueError, "expected a last stride of 1", lambda o: torch.cat([o, o], -1)[..., ::2]),
        ("one row", ValueError, "expected elements that do not overlap", lambda o: o[:, :1].expand_as(o)),
    ]
    return [pytest.param(*change[1:], id=change[0]) for change in changes]


@each_way
@pytest.mark.parametrize(("error", "words", "change"), wrong_outs())
def test_wrong_outs(device: torch.device, op: str, error: type[Exception], words: str, change: Any) -> None:
    call = REGISTRY[op].smallest(device=device)
    o = run(op, copy_of(call))
    with pytest.raises(error, match=f"^{op}: out: {words}"):
        run(op, call | {"out": change(o)})


@each_way
def test_an_out_in_the_memory_of_an_input_is_refused(device: torch.device, op: str) -> None:
    call = REGISTRY[op].smallest(device=device)
    name = next(name for name in ("x", "v", "z") if name in call)
    out = call[name].view(run(op, dict(call)).shape)
    with pytest.raises(
        ValueError, match=rf"^{op}: out: expected memory of its own, got memory that it shares with {name}"
    ):
        run(op, call | {"out": out})
