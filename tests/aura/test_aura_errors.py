"""Bad input to the AURA ops is an error that names the op, the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.gdn.test_errors import Bad, Change, change, message_of, put
from tests.helpers.aura import OPS, there, valid_call
from tests.helpers.calls import run_op, tensors_of

CPU = torch.device("cpu")


def calls_with(argument: str) -> list[str]:
    return [op for op in OPS if argument in valid_call(op, CPU)]


def last(x: Tensor) -> Tensor:
    """One element fewer in the last dimension."""
    return x[..., :-1]


def wrong_for(name: str) -> list[tuple[type[Exception], str, Change]]:
    """A value that no op accepts for an argument of this name."""
    if name in ("x", "q"):  # activations
        return [
            (TypeError, "integers", change(name, torch.Tensor.int)),
            (TypeError, "float64", change(name, torch.Tensor.double)),
            (ValueError, "a head size of 72", change(name, lambda x: x.new_zeros(*x.shape[:-1], 72))),
        ]
    if name == "starts":
        return [
            (TypeError, "floats", change(name, torch.Tensor.float)),
            (ValueError, "too few", change(name, last)),
        ]
    if name == "slots":
        return [
            (TypeError, "floats", change(name, torch.Tensor.float)),
            (ValueError, "too few", change(name, last)),
            (ValueError, "one for each head", change(name, lambda x: x.expand(2, 2, 5))),
        ]
    if name.endswith("codes"):
        return [
            (TypeError, "int64", change(name, torch.Tensor.long)),
            (ValueError, "a word too few", change(name, last)),
        ]
    found: list[tuple[type[Exception], str, Change]] = [
        (TypeError, "float16 for float32", change(name, torch.Tensor.half)),
        (ValueError, "too few", change(name, last)),
        (ValueError, "a dimension too many", change(name, lambda x: x[None])),
    ]
    return found


def bad_calls() -> list[Bad]:
    calls = [
        Bad(op, name, error, what, how)
        for op in OPS
        for name in tensors_of(valid_call(op, CPU))
        for error, what, how in wrong_for(name)
    ]
    calls.append(Bad("aura_rotate", "x", ValueError, "no dimension", put("x", torch.tensor(1.0))))
    calls.append(Bad("aura_encode_", "x", ValueError, "three dimensions", change("x", lambda x: x[0])))
    calls.append(Bad("aura_encode_", "codes", ValueError, "words apart", change("codes", words_apart)))
    calls.append(Bad("aura_encode_", "codes", ValueError, "one row for two", change("codes", lambda x: x[:1])))
    calls.append(Bad("aura_decode", "dtype", TypeError, "float64", put("dtype", torch.float64)))
    q = {"aura_flash_p1": "q_rot", "aura_attention": "q"}
    for op, name in q.items():
        calls.append(Bad(op, name, ValueError, "3 heads for 2", change(name, lambda x: x[:, :3])))
        calls.append(Bad(op, "window", ValueError, "negative", put("window", -1)))
        calls.append(Bad(op, "window", ValueError, "not causal", put("causal", False)))
        calls.append(Bad(op, "q_offset", ValueError, "2^31", put("q_offset", 2**31)))
        calls.append(Bad(op, "block_size", ValueError, "24", put("block_size", 24)))
        calls.append(Bad(op, "block_size", ValueError, "0", put("block_size", 0)))
        calls.append(Bad(op, "key_codes", ValueError, "no heads", change("key_codes", lambda x: x[:, :0])))
        calls.append(Bad(op, "value_codes", ValueError, "a token fewer", change("value_codes", lambda x: x[:, :, 1:])))
        calls.append(Bad(op, "key_codebook", ValueError, "32 centroids", put("key_codebook", torch.zeros(32))))
    calls.append(Bad("aura_attention", "length", ValueError, "negative", put("length", -1)))
    calls.append(Bad("aura_attention", "length", ValueError, "more than there are", put("length", 21)))
    calls.append(Bad("aura_flash_p1", "q_sums", ValueError, "without means", put("key_means", None)))
    calls.append(Bad("aura_flash_p1", "q_sums", ValueError, "none for means", put("q_sums", None)))
    calls.append(Bad("aura_flash_p2", "dtype", TypeError, "float64", put("dtype", torch.float64)))
    return calls


def words_apart(codes: Tensor) -> Tensor:
    return codes.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("bad", bad_calls(), ids=lambda bad: bad.name)
def test_bad_input_is_an_error(device: torch.device, bad: Bad) -> None:
    call = bad.how(valid_call(bad.op, CPU))
    if device.type == "mps" and bad.name.endswith("float64") and bad.argument != "dtype":
        with pytest.raises(TypeError, match="float64"):
            call[bad.argument].to(device)
        return
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
def test_a_tensor_on_another_device_is_an_error(device: torch.device, op: str) -> None:
    call: dict[str, Any] = valid_call(op, device)
    for name in tensors_of(call)[1:]:
        elsewhere = call | {name: call[name].to("cpu" if device.type == "mps" else "meta")}
        with pytest.raises(ValueError, match=f"^{op}: {name}: expected a tensor on {device.type}"):
            run_op(op, elsewhere)


@pytest.mark.parametrize("op", OPS)
def test_an_input_that_requires_grad_is_an_error(device: torch.device, op: str) -> None:
    call = valid_call(op, device)
    for name in tensors_of(call):
        if not call[name].is_floating_point():
            continue
        with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor that does not require grad"):
            run_op(op, call | {name: call[name].clone().requires_grad_()})
