"""Tests what PyTorch can do to a call of any op besides running it: derivatives, function transforms, and tensors that
are subclasses. Each call either has the plain call's results, or raises an error that names the op.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map, tree_map_only

from tests.helpers.devices import ready
from torch_gdn_check.registry import REGISTRY, OpEntry
from torch_gdn_check.registry.inputs import Call, tensors_of, to_device
from torch_gdn_check.registry.registry import Named

INDICES = (torch.int32, torch.int64)
each_op = pytest.mark.parametrize("entry", REGISTRY.values(), ids=REGISTRY)


def floating(call: Call) -> list[str]:
    return [name for name in tensors_of(call) if call[name].is_floating_point()]


class Plain(Tensor):
    """A subclass that changes nothing."""


class Functions(Tensor):
    """A subclass that sees each function."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A subclass without memory, whose __torch_dispatch__ calls the op on the tensor that it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> Any:
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        options |= {"dtype": inner.dtype, "device": inner.device}
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, **options)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map_only(Tensor, cls, results)


def unwrapped(x: Any) -> Any:
    return x.inner if isinstance(x, Wrapper) else x


def mapped(call: Call, change: Callable[[Tensor], Any]) -> Call:
    return {name: change(x) if isinstance(x, Tensor) else x for name, x in call.items()}


@functools.cache
def drawn(op: str) -> Call:
    return REGISTRY[op].smallest()


def call_of(entry: OpEntry[Any], device: torch.device | str = "cpu") -> Call:
    return to_device(drawn(entry.name), device)


def plain(entry: OpEntry[Any], device: torch.device | str = "cpu") -> Named:
    call = call_of(entry, device)
    return entry.outputs(call, entry.run(call))


def assert_same(result: Named, expected: Named) -> None:
    assert result.keys() == expected.keys()
    for name, x in result.items():
        assert torch.equal(unwrapped(x).as_subclass(Tensor), expected[name]), name


@contextmanager
def raises_for(entry: OpEntry[Any], error: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(error, match=words) as caught:
        yield
    assert re.search(rf"gdn::{entry.name}\b", str(caught.value)), caught.value


def no_tangent(entry: OpEntry[Any], name: str) -> AbstractContextManager[None]:
    pattern = rf"^gdn::{entry.name}: {name}: expected a tensor without a tangent, got one with a tangent\. "
    return raises_for(entry, NotImplementedError, pattern + "Trying to use forward AD with .+ that does not support it")


# ---- derivatives -----------------------------------------------------------------------------------------------------


@each_op
def test_a_tangent_is_refused(device: torch.device, entry: OpEntry[Any]) -> None:
    """Also that of a tensor that a call need not have, of one that the op writes, and without reverse mode."""
    call = call_of(entry, device)
    with torch.no_grad(), forward_ad.dual_level():
        for name in floating(call):
            dual = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
            with no_tangent(entry, name):
                entry.run(call | {name: dual})


def test_ops_take_no_lists_of_tensors() -> None:
    """Gradients are looked for in tensors, not in lists."""
    assert not [name for name, entry in REGISTRY.items() if "Tensor[" in str(entry.overload._schema)]


JACOBIANS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x,), (torch.ones_like(x),)),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
}


@pytest.mark.parametrize("transform", JACOBIANS)
def test_a_forward_mode_transform_is_refused(device: torch.device, transform: str) -> None:
    f = lambda x: torch.ops.gdn.l2norm(x, 1e-6)[0]  # noqa: E731
    error = RuntimeError if transform == "hessian" else NotImplementedError  # forward mode over reverse mode
    with pytest.raises(error, match=r"^gdn::l2norm: x: expected a tensor "):
        JACOBIANS[transform](f, torch.ones(2, 4, device=device))


@each_op
def test_a_function_that_is_differentiated_may_call_the_op_on_other_tensors(entry: OpEntry[Any]) -> None:
    calls = [call_of(entry) for _ in range(2)]

    def f(x: Tensor) -> tuple[Tensor, Named]:
        call = calls.pop()
        return (x * x).sum(), entry.outputs(call, entry.run(call))

    expected = plain(entry)
    gradient, result = torch.func.grad(f, has_aux=True)(torch.ones(3))
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert_same(result, expected)
    _, tangent, result = torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),), has_aux=True)
    assert tangent == 6
    assert_same(result, expected)


@each_op
def test_a_gradient_of_a_transform_is_refused(entry: OpEntry[Any]) -> None:
    call = call_of(entry)
    for name in floating(call):
        f = lambda x, name=name: entry.run(call | {name: x})  # noqa: E731
        for transform in (torch.func.grad(f), lambda x, f=f: torch.func.vjp(f, x)):
            with raises_for(entry, RuntimeError, f"{name}: expected a tensor that does not require grad"):
                transform(call[name].clone())


# ---- function transforms ---------------------------------------------------------------------------------------------


def transformed(entry: OpEntry[Any], call: Call, transform: Callable[[Callable[[Call], Named]], Any]) -> Any:
    """Calls the transform of a function of the call's tensors."""
    tensors = {name: call[name] for name in tensors_of(call)}

    def f(given: Call) -> Named:
        made = {name: given.get(name, value) for name, value in call.items()}
        return entry.outputs(made, entry.run(made))

    return transform(f)(tensors)


@pytest.mark.sweep(6)
@each_op
def test_vmap(device: torch.device, entry: OpEntry[Any]) -> None:
    """Without a batching rule PyTorch calls the op once for each tensor of the batch. It takes no op that writes."""
    expected = plain(entry, device)
    batch = mapped(call_of(entry, device), lambda x: torch.stack([x, x]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if entry.written:
            with raises_for(entry, RuntimeError, "Batching rule not implemented"):
                transformed(entry, batch, torch.func.vmap)
            return
        result = transformed(entry, batch, torch.func.vmap)
    for i in range(2):
        assert_same({name: x[i] for name, x in result.items()}, expected)


@pytest.mark.sweep(6)
@each_op
def test_functionalize(device: torch.device, entry: OpEntry[Any]) -> None:
    call = call_of(entry, device)
    if entry.written:
        with raises_for(entry, RuntimeError, "whose output has alias annotations"):
            transformed(entry, call, torch.func.functionalize)
        return
    assert_same(transformed(entry, call, torch.func.functionalize), plain(entry, device))


# ---- subclasses ------------------------------------------------------------------------------------------------------

SUBCLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "a plain subclass": lambda x: x.as_subclass(Plain),
    "a parameter": lambda x: Parameter(x, requires_grad=False),
    "__torch_function__": lambda x: x.as_subclass(Functions),
    "__torch_dispatch__": Wrapper,
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("subclass", SUBCLASSES)
@each_op
def test_a_subclass(device: torch.device, entry: OpEntry[Any], subclass: str) -> None:
    """A subclass sees the op, and what it passes on has the plain call's results. The op writes to the same memory."""
    expected = plain(entry, device)
    memory = call_of(entry, device)
    call = mapped(memory, SUBCLASSES[subclass])
    Functions.seen.clear()
    result = entry.outputs(call, entry.run(call))
    assert_same(result, expected)
    for name in expected.keys() & set(entry.written):
        assert torch.equal(memory[name], expected[name]), name
    if subclass == "__torch_function__":
        assert entry.overload in Functions.seen
    if subclass == "__torch_dispatch__":
        assert all(isinstance(x, Wrapper) for x in result.values())


@each_op
def test_one_tensor_is_a_subclass(entry: OpEntry[Any]) -> None:
    expected = plain(entry)
    for name in tensors_of(call_of(entry)):
        call = call_of(entry)
        call[name] = Wrapper(call[name])
        assert_same(entry.outputs(call, entry.run(call)), expected)


@each_op
@pytest.mark.parametrize("fake", [False, True])
def test_a_subclass_of_meta_and_of_fake_tensors(entry: OpEntry[Any], fake: bool) -> None:
    expected, base = plain(entry), call_of(entry)
    with FakeTensorMode() if fake else nullcontext() as mode:
        change = mode.from_tensor if fake else lambda x: x.to("meta")
        call = mapped(base, lambda x: TwoTensor(change(x), change(x)))
        results = entry.run(call)
    result = entry.outputs(call, results)
    assert result.keys() == expected.keys()
    for name, x in result.items():
        assert isinstance(x, TwoTensor) and (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name


# ---- tensors without memory ------------------------------------------------------------------------------------------


def freed(x: Tensor) -> Tensor:
    """Returns a copy whose memory was freed, as sharded training frees weights between their uses."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def one_byte_short(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - 1)
    return x


@each_op
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_tensor_without_memory_is_refused(entry: OpEntry[Any], device: str) -> None:
    """PyTorch's own ops read past its end, and some end the process. On mps, index tensors may be on the CPU."""
    call = call_of(entry)
    names = [name for name in tensors_of(call) if call[name].numel()]
    if device == "mps":
        names = [name for name in names if call[name].dtype in INDICES]
    for name in names:
        for change in (freed, one_byte_short, Wrapper):
            changed = to_device(call, ready(device)) | {name: change(call[name])}
            with (
                torch._C._DisableTorchDispatch(),
                pytest.raises(ValueError, match=f"{name}: expected memory of at lea"),
            ):
                entry.run(changed)
