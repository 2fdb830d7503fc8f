"""Tests that bad input raises an error that names the op, the argument, what was expected and passed; never a crash."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_gdn
from tests.helpers.entries import INDICES
from tests.helpers.prefill import on_mps
from torch_gdn_check.registry import REGISTRY, OpEntry
from torch_gdn_check.registry.inputs import Call, empty_on, tensors_of, to_device
from torch_gdn_check.registry.registry import Invalid

PUBLIC_FUNCTIONS = [x for x in (getattr(torch_gdn, name) for name in torch_gdn.__all__) if inspect.isfunction(x)]
WRONG = [(entry, bad) for entry in REGISTRY.values() for bad in entry.invalid(entry)]
each_op = pytest.mark.parametrize("entry", REGISTRY.values(), ids=REGISTRY)
FLOATS = [entry for entry in REGISTRY.values() if entry.smallest()[entry.first].is_floating_point()]


def name_of(bad: object) -> str:
    if isinstance(bad, OpEntry):
        return str(bad.name)
    assert isinstance(bad, Invalid)
    return f"{bad.argument}: {bad.what}{' packed' if bad.packed else ''}"


def changed(entry: OpEntry[Any], bad: Invalid) -> Call:
    return bad.change(entry.smallest(packed=bad.packed))


def message_of(entry: OpEntry[Any], bad: Invalid) -> str:
    """Returns a pattern for '<op>: <argument>: expected ..., got ...'."""
    return rf"^{entry.name}: {bad.argument}: expected .+, got .+"


def other_tensors(entry: OpEntry[Any], name: str, x: Tensor) -> Iterator[tuple[str, type[Exception], Tensor]]:
    """Yields how a tensor can differ, in the words of OpEntry.takes; the error of ops that do not take that; and it."""
    yield "another kind", TypeError, x.int() if x.is_floating_point() else x.float()
    if x.is_floating_point():
        yield "float", TypeError, x.float() if x.dtype == torch.float16 else x.half()
        yield "float64", TypeError, x.double()
    yield "fewer", ValueError, x[0]
    yield "more", ValueError, x[None]
    for d in range(x.dim()):
        yield f"{d}-", ValueError, x.narrow(d, 0, x.shape[d] - 1)
        yield f"{d}", ValueError, x.narrow(d, 0, 0)


def is_taken(takes: str, what: str) -> bool:
    words = takes.split()
    wider = {"float": "float64", "fewer": "rank", "more": "rank"}.get(what, what.rstrip("-"))
    return what in words or wider in words


SIZES_OF_LATER = {"cu_seqlens": "seq_lens", "conv_weight": "state_pool"}  # arguments that are compared with a later one


def blames(entry: OpEntry[Any], message: str, name: str, what: str) -> bool:
    """Returns whether an error names the changed argument, or says what another one has to have in common with it.

    A size may also be the one that a later argument was compared with.
    """
    refused = re.match(rf"{entry.name}: (\w+): expected (.+), got .+", message, re.DOTALL)
    if refused is None:
        return False
    blamed, expected = refused.groups()
    if blamed == name or re.search(rf"\b{name}\b", expected):
        return True
    is_later = entry.arguments.index(blamed) > entry.arguments.index(name)
    return what[0].isdigit() and (is_later or SIZES_OF_LATER.get(blamed) == name)


@each_op
def test_a_tensor_of_another_kind_or_shape(device: torch.device, entry: OpEntry[Any]) -> None:
    """An op takes what its entry says, and refuses all other differences, also for tensors without memory."""
    call = entry.smallest()
    assert entry.takes.keys() <= call.keys()
    for name in tensors_of(call):
        for what, error, x in other_tensors(entry, name, call[name]):
            changed = call | {name: x}
            fake = empty_on(changed, "meta")
            if is_taken(entry.takes.get(name, ""), what):
                entry.run(fake)
                continue
            calls = [fake] if what == "float64" and device.type == "mps" else [fake, to_device(changed, device)]
            for each in calls:
                with pytest.raises(error) as caught:
                    entry.run(each)
                assert blames(entry, str(caught.value), name, what), f"{name}: {what}: {caught.value}"


SIGNED = {"scale", "lower_bound", "null_index", "q_offset", "routed_scaling_factor"}


@each_op
def test_numbers_below_zero_and_unknown_words(device: torch.device, entry: OpEntry[Any]) -> None:
    call = entry.smallest()
    for each in entry.overload._schema.arguments:
        kind = str(each.type).removeprefix("Optional[").removesuffix("]")
        if kind not in ("int", "float", "str") or each.name in SIGNED or each.name.endswith("dtype"):
            continue
        changed = call | {each.name: "no such word" if kind == "str" else -1}
        for where in (device, "meta"):
            with pytest.raises(ValueError, match=f"^{entry.name}: {each.name}: expected .+, got "):
                entry.run(to_device(changed, where))


@each_op
def test_other_refused_calls_name_arguments(entry: OpEntry[Any]) -> None:
    assert {bad.argument for bad in entry.invalid(entry)} <= set(entry.arguments)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("entry", "bad"), WRONG, ids=name_of)
def test_bad_input_is_an_error(device: torch.device, entry: OpEntry[Any], bad: Invalid) -> None:
    call = changed(entry, bad)
    if device.type == "mps" and getattr(call.get(bad.argument), "dtype", None) == torch.float64:
        with pytest.raises(TypeError, match="float64"):
            to_device(call, device)
        return
    on_device = to_device(call, device)
    if bad.by_contents:  # the host reads these on the CPU, before it launches anything
        on_device |= {name: call[name] for name in INDICES & call.keys()}
    with pytest.raises(bad.error, match=message_of(entry, bad)):
        entry.run(on_device)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("entry", "bad"), [each for each in WRONG if not each[1].by_contents], ids=name_of)
def test_the_fake_raises_the_same(entry: OpEntry[Any], bad: Invalid) -> None:
    call = changed(entry, bad)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        with pytest.raises(bad.error, match=message_of(entry, bad)):
            entry.run(fake)


@each_op
def test_an_input_that_requires_grad_is_an_error(device: torch.device, entry: OpEntry[Any]) -> None:
    call = to_device(entry.smallest(), device)
    for name in tensors_of(call):
        if call[name].is_floating_point():
            with pytest.raises(RuntimeError, match=f"{entry.name}: {name}: expected a tensor that does not require gr"):
                entry.run(call | {name: call[name].clone().requires_grad_()})


@each_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_is_none(device: torch.device, entry: OpEntry[Any], mode: Any) -> None:
    expected_call, call = (to_device(entry.smallest(), device) for _ in range(2))
    expected = entry.outputs(expected_call, entry.run(expected_call))
    first = next(name for name in tensors_of(call) if name not in entry.written)
    if call[first].is_floating_point():
        call[first].requires_grad_()
    with mode():
        ours = entry.outputs(call, entry.run(call))
    for name, x in ours.items():
        assert not x.requires_grad and torch.equal(x, expected[name]), name


ON_THE_CPU = INDICES | {"src"}  # all other tensors must be on the device of the first argument


@each_op
def test_a_tensor_on_another_device_is_an_error(device: torch.device, entry: OpEntry[Any]) -> None:
    """On `mps` the tensor is on the CPU. On the CPU it is a meta tensor, which loaders of models can leave behind."""
    call = to_device(entry.smallest(), device)
    for name in tensors_of(call)[1:]:
        if name not in ON_THE_CPU:
            elsewhere = call | {name: call[name].to("cpu" if device.type == "mps" else "meta")}
            with pytest.raises(ValueError, match=f"^{entry.name}: {name}: expected a tensor on {device.type}"):
                entry.run(elsewhere)


@on_mps()
@pytest.mark.parametrize(
    "entry", [entry for entry in REGISTRY.values() if ON_THE_CPU & {*entry.arguments}], ids=name_of
)
def test_index_tensors_may_stay_on_the_cpu(device: torch.device, entry: OpEntry[Any]) -> None:
    expected_call, call = (entry.smallest(entry.packable, device) for _ in range(2))
    call |= {name: call[name].cpu() for name in tensors_of(call) if name in ON_THE_CPU}
    expected = entry.outputs(expected_call, entry.run(expected_call))
    for name, x in entry.outputs(call, entry.run(call)).items():
        assert torch.equal(x, expected[name]), name


PACKABLE = [entry for entry in REGISTRY.values() if entry.packable]
OF_A_SEQUENCE = ("initial_state", "dfinal_state", "h0", "dht", "state_indices", "has_initial_state", "chunk_indices")


@pytest.mark.parametrize("boundaries_on_the_cpu", [False, True])
@pytest.mark.parametrize("entry", PACKABLE, ids=name_of)
def test_no_sequences_give_empty_outputs(
    device: torch.device, entry: OpEntry[Any], boundaries_on_the_cpu: bool
) -> None:
    """cu_seqlens is [0], tensors have no tokens, and the pool stays as it is."""
    call = entry.smallest(packed=True, device=device)
    for name in tensors_of(call):
        if call[name].shape[:2] == (1, 20) or name in ("h", "dh"):
            call[name] = call[name][:, :0]
        elif name in OF_A_SEQUENCE:
            call[name] = call[name][:0]
    call["cu_seqlens"] = call["cu_seqlens"][:1].to("cpu" if boundaries_on_the_cpu else device)
    before = {name: call[name].clone() for name in entry.written if name in call}
    result = entry.outputs(call, entry.run(call))
    parameter_grads = result.keys() - before.keys()  # gradients, which are sums over no tokens
    assert result.keys() >= before.keys() and not any(result[name].any() for name in parameter_grads)
    assert not parameter_grads or entry.name.endswith("_bwd")
    assert all(torch.equal(call[name], x) for name, x in before.items())


LAZY_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a negated view": torch._neg_view,
    "a conjugated view": lambda x: x.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("what", LAZY_VIEWS)
@pytest.mark.parametrize("op", [name for name, entry in REGISTRY.items() if "state_pool" in entry.written])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_without_its_numbers_in_memory_cannot_be_written(
    device: torch.device, op: str, what: str, mode: Any
) -> None:
    with mode():
        call = to_device(REGISTRY[op].smallest(), device)
        call["state_pool"] = LAZY_VIEWS[what](call["state_pool"])
        with pytest.raises(
            ValueError, match=f"^{op}: state_pool: expected a tensor that can be written .+, got {what}"
        ):
            REGISTRY[op].run(call)


@pytest.mark.parametrize("op", [name for name, entry in REGISTRY.items() if entry.written])
def test_writing_to_a_lazy_clone_leaves_the_original_as_it_was(device: torch.device, op: str) -> None:
    entry = REGISTRY[op]
    call = to_device(entry.smallest(), device)
    originals = {name: call[name] for name in entry.written if call.get(name) is not None}
    copies = {name: x.clone() for name, x in originals.items()}
    call |= {name: torch._lazy_clone(x) for name, x in originals.items()}
    if device.type == "mps":
        with pytest.raises(ValueError, match=rf"^{op}: \w+: expected memory of its own, got a lazy clone on mps"):
            entry.run(call)
        return
    entry.run(call)
    assert any(not torch.equal(call[name], copies[name]) for name in copies)
    assert all(torch.equal(x, copies[name]) for name, x in originals.items())


@pytest.mark.parametrize("entry", FLOATS, ids=name_of)
def test_a_negated_view_is_read_as_its_numbers(device: torch.device, entry: OpEntry[Any]) -> None:
    call, negated = (to_device(entry.smallest(), device) for _ in range(2))
    first = entry.first
    call[first], negated[first] = -call[first], torch._neg_view(negated[first])
    expected = entry.outputs(call, entry.run(call))
    for name, x in entry.outputs(negated, entry.run(negated)).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("function", PUBLIC_FUNCTIONS, ids=lambda function: function.__name__)
def test_an_unknown_keyword_is_an_error_that_names_it(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=re.escape("'use_gate_in_kernal'")):
        function(use_gate_in_kernal=True)


TAKE_TENSORS = [f for f in PUBLIC_FUNCTIONS if "Tensor" in str(inspect.signature(f))]


@pytest.mark.parametrize("function", TAKE_TENSORS, ids=lambda function: function.__name__)
def test_an_array_is_an_error_that_names_the_argument(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.default is x.empty or x.name == "weight"]
    name = f"({'|'.join(names)})"
    with pytest.raises((TypeError, RuntimeError), match=f"{name}: .*got ndarray|'{name}' but instead found .*ndarray"):
        function(**dict.fromkeys(names, np.zeros((1, 4, 2, 8), np.float32)))


def test_an_op_without_a_kernel_for_the_device_says_so() -> None:
    with pytest.raises(NotImplementedError, match="gdn::solve_tril"):
        torch.ops.gdn.solve_tril(torch.zeros(1, 16, 1, 16).to_sparse())


TAKE_CU_SEQLENS = [f for f in PUBLIC_FUNCTIONS if "cu_seqlens" in inspect.signature(f).parameters]


@pytest.mark.parametrize("function", TAKE_CU_SEQLENS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("cu_seqlens", [[0, 10, 20], np.array([0, 10, 20])], ids=["list", "ndarray"])
def test_cu_seqlens_must_be_a_tensor(function: Callable[..., Any], cu_seqlens: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    call = {x.name: torch.zeros(1) for x in parameters if x.default is x.empty}
    got = type(cu_seqlens).__name__
    with pytest.raises(TypeError, match=f"^{function.__name__}: cu_seqlens: expected a tensor of .*, got {got}; "):
        function(**call | {"cu_seqlens": cu_seqlens})


def test_a_layout_with_heads_before_tokens_is_suspected() -> None:
    q, v, g = torch.zeros(1, 2, 20, 64), torch.zeros(1, 4, 20, 64), torch.zeros(1, 4, 20)
    with pytest.raises(ValueError, match=r"v: expected .*, got \[1, 4, 20, 64\] \(is the layout \[B, H, T, \.\.\.\]\?"):
        torch_gdn.chunk_gated_delta_rule(q, q, v, g, g)
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    with pytest.raises(ValueError, match=r"g: expected .*, got \[1, 19, 4\]$"):
        torch_gdn.chunk_gated_delta_rule(q, q, v, torch.zeros(1, 19, 4), torch.zeros(1, 20, 4))
