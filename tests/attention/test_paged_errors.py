"""Bad input to the ops on pages is an error that names the op, the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.gdn.test_errors import Bad, change, message_of, put
from tests.helpers.aura import there
from tests.helpers.calls import run_op, tensors_of
from tests.helpers.paged import OPS, valid_call

CPU = torch.device("cpu")
STORE, ATTEND, CODED = OPS


def rows_apart(x: Tensor) -> Tensor:
    """With a last stride that is not 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def bad_pages(op: str, activation: str) -> list[Bad]:
    """What both ops refuse of their caches."""
    calls = [
        Bad(op, activation, TypeError, "integers", change(activation, torch.Tensor.int)),
        Bad(op, activation, ValueError, "two dimensions", change(activation, lambda x: x[0])),
    ]
    for name in ("key_cache", "value_cache"):
        calls.append(Bad(op, name, TypeError, "integers", change(name, torch.Tensor.int)))
        calls.append(Bad(op, name, ValueError, "three dimensions", change(name, lambda x: x[0])))
        calls.append(Bad(op, name, ValueError, "a column too few", change(name, lambda x: x[..., :-1])))
        calls.append(Bad(op, name, ValueError, "columns apart", change(name, rows_apart)))
    calls.append(Bad(op, "value_cache", TypeError, "another dtype", change("value_cache", torch.Tensor.half)))
    calls.append(Bad(op, "value_cache", ValueError, "a block fewer", change("value_cache", lambda x: x[1:])))
    return calls


def bad_calls() -> list[Bad]:
    calls = [*bad_pages(STORE, "key"), *bad_pages(ATTEND, "q")]
    calls.append(Bad(STORE, "key_cache", ValueError, "a head fewer", change("key_cache", lambda x: x[:, :, 1:])))
    calls.append(Bad(STORE, "value", TypeError, "another dtype", change("value", torch.Tensor.half)))
    calls.append(Bad(STORE, "value", ValueError, "a token fewer", change("value", lambda x: x[1:])))
    calls.append(Bad(STORE, "slot_mapping", TypeError, "floats", change("slot_mapping", torch.Tensor.float)))
    calls.append(Bad(STORE, "slot_mapping", ValueError, "6 for 5", put("slot_mapping", torch.arange(6))))
    calls.append(Bad(STORE, "slot_mapping", ValueError, "two dimensions", change("slot_mapping", lambda x: x[None])))

    for size in (8, 40, 272):
        calls.append(Bad(ATTEND, "q", ValueError, f"D of {size}", change("q", lambda x, n=size: x.new_zeros(11, 4, n))))
    calls.append(Bad(ATTEND, "q", ValueError, "3 heads for 2", three_heads))
    calls.append(Bad(ATTEND, "out", TypeError, "another dtype", change("out", torch.Tensor.half)))
    calls.append(Bad(ATTEND, "out", ValueError, "a row fewer", change("out", lambda x: x[1:])))
    calls.append(Bad(ATTEND, "out", ValueError, "columns apart", change("out", rows_apart)))
    calls.append(Bad(ATTEND, "key_cache", ValueError, "no heads", no_heads))
    calls.append(Bad(ATTEND, "key_cache", ValueError, "blocks of 0", empty_blocks))
    for name in ("block_table", "cu_seqlens", "seq_lens"):
        calls.append(Bad(ATTEND, name, TypeError, "int64", change(name, torch.Tensor.long)))
        calls.append(Bad(ATTEND, name, ValueError, "a dimension more", change(name, lambda x: x[None])))
    for name in ("block_table", "cu_seqlens"):
        calls.append(Bad(ATTEND, name, ValueError, "a sequence fewer", change(name, lambda x: x[1:])))
    for name in ("max_query_len", "max_seq_len"):
        calls.append(Bad(ATTEND, name, ValueError, "negative", put(name, -1)))
        calls.append(Bad(ATTEND, name, ValueError, "2^31", put(name, 2**31)))
    calls.append(Bad(ATTEND, "window", ValueError, "negative", put("window", -1)))
    calls.append(Bad(ATTEND, "window", ValueError, "not causal", put("causal", False)))
    calls.append(Bad(ATTEND, "sinks", TypeError, "float16", change("sinks", torch.Tensor.half)))
    calls.append(Bad(ATTEND, "sinks", ValueError, "too few", change("sinks", lambda x: x[1:])))
    calls += bad_codes()
    return calls


def bad_codes() -> list[Bad]:
    calls = [
        Bad(CODED, "q", ValueError, "D of 48", heads_of_48),
        Bad(CODED, "q", TypeError, "integers", change("q", torch.Tensor.int)),
        Bad(CODED, "window", ValueError, "negative", put("window", -1)),
        Bad(CODED, "sinks", ValueError, "too few", change("sinks", lambda x: x[1:])),
    ]
    for name in ("key", "value"):
        codes, norms, codebook, signs = (f"{name}_{part}" for part in ("codes", "norms", "codebook", "signs"))
        calls.append(Bad(CODED, codes, TypeError, "int64", change(codes, torch.Tensor.long)))
        calls.append(Bad(CODED, codes, ValueError, "a word too few", change(codes, lambda x: x[..., 1:])))
        calls.append(Bad(CODED, codes, ValueError, "words apart", change(codes, rows_apart)))
        calls.append(Bad(CODED, norms, ValueError, "a head fewer", change(norms, lambda x: x[:, :, 1:])))
        calls.append(Bad(CODED, norms, TypeError, "float16", change(norms, torch.Tensor.half)))
        calls.append(Bad(CODED, codebook, ValueError, "32 centroids", put(codebook, torch.zeros(32))))
        calls.append(Bad(CODED, signs, ValueError, "too few", change(signs, lambda x: x[1:])))
    return calls


def heads_of_48(call: dict) -> dict:
    return call | {name: call[name].new_zeros(11, 4, 48) for name in ("q", "out")}


def three_heads(call: dict) -> dict:
    return call | {name: call[name][:, :3] for name in ("q", "out")}


def no_heads(call: dict) -> dict:
    return call | {name: call[name][:, :, :0] for name in ("key_cache", "value_cache")}


def empty_blocks(call: dict) -> dict:
    return call | {name: call[name][:, :0] for name in ("key_cache", "value_cache")}


@pytest.mark.parametrize("bad", bad_calls(), ids=lambda bad: bad.name)
def test_bad_input_is_an_error(device: torch.device, bad: Bad) -> None:
    call = bad.how(valid_call(bad.op, CPU))
    with pytest.raises(bad.error, match=message_of(bad)):
        run_op(bad.op, there(call, device))


@pytest.mark.parametrize("bad", bad_calls(), ids=lambda bad: bad.name)
def test_the_fake_raises_the_same(bad: Bad) -> None:
    call = bad.how(valid_call(bad.op, CPU))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        with pytest.raises(bad.error, match=message_of(bad)):
            run_op(bad.op, fake)


@pytest.mark.parametrize("op", OPS)
def test_an_input_that_requires_grad_is_an_error(device: torch.device, op: str) -> None:
    call = valid_call(op, device)
    for name in tensors_of(call):
        if call[name].is_floating_point():
            with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor that does not require grad"):
                run_op(op, call | {name: call[name].clone().requires_grad_()})


def test_index_tensors_may_stay_on_the_cpu(device: torch.device) -> None:
    call = valid_call(ATTEND, device)
    expected = call["out"].clone()
    run_op(ATTEND, call | {"out": expected})
    run_op(ATTEND, call | {name: call[name].cpu() for name in ("block_table", "cu_seqlens", "seq_lens")})
    assert torch.equal(call["out"].cpu(), expected.cpu())
