"""Tests what PyTorch does with the gradients of the delta rules alone.

tests/layers/test_gradients.py has what these gradients share with those of norms, gates and the convolution.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_gdn
from tests.helpers.errors import assert_same_bits
from tests.helpers.gradients import RULES, differentiable, draw_call, draw_outer, gradients_of
from torch_gdn_check.registry.inputs import Call, to_device

pytestmark = pytest.mark.sweep(4)
each_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture
def call(rule: str, device: torch.device) -> Call:
    return to_device(draw_call(rule, 35, raw=True), device)


def leaves_of(call: Call) -> dict[str, Tensor]:
    return {name: call[name].detach().clone().requires_grad_() for name in differentiable(call)}


def loss_of(rule: str, call: Call, leaves: dict[str, Tensor], **options: Any) -> Tensor:
    o, state = RULES[rule][0](**(call | leaves | {"output_final_state": True} | options))
    return (o * o).sum() + state.sum()


def gradients(rule: str, call: Call, how: Callable[..., Tensor] = loss_of) -> dict[str, Tensor]:
    leaves = leaves_of(call)
    how(rule, call, leaves).backward()
    return {name: x.grad for name, x in leaves.items() if x.grad is not None}


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, x in result.items():
        assert_same_bits(name, x, expected[name])


@each_rule
def test_values_are_those_without_gradients(rule: str, call: Call) -> None:
    o, state = RULES[rule][0](**(call | leaves_of(call) | {"output_final_state": True}))
    plain = RULES[rule][0](**(call | {"output_final_state": True}))
    assert_same_bits("o", o.detach(), plain[0])
    assert_same_bits("final_state", state.detach(), plain[1])


@each_rule
def test_a_compiled_step_without_a_final_state(rule: str, call: Call) -> None:
    """torch.compile then passes zeros as the gradient of a state that nobody asked for."""

    def o_of(_: str, call: Call, leaves: dict[str, Tensor]) -> Tensor:
        return RULES[rule][0](**(call | leaves))[0].sum()  # type: ignore[no-any-return]

    torch._dynamo.reset()
    compiled = torch.compile(partial(o_of, rule), fullgraph=True, backend="aot_eager")
    assert_same(gradients(rule, call, lambda _, *args: compiled(*args)), gradients(rule, call, o_of))


@each_rule
def test_a_reentrant_checkpoint(rule: str, call: Call) -> None:
    def how(rule: str, call: Call, leaves: dict[str, Tensor]) -> Tensor:
        def run(*tensors: Tensor) -> Tensor:
            return loss_of(rule, call, dict(zip(leaves, tensors, strict=True)))

        return checkpoint(run, *leaves.values(), use_reentrant=True)  # type: ignore[no-any-return]

    assert_same(gradients(rule, call, how), gradients(rule, call))


@each_rule
def test_a_tensor_used_twice(rule: str, device: torch.device) -> None:
    call = to_device(draw_call(rule, 35, HV=2), device)
    shared = call["q"].clone().requires_grad_()
    loss_of(rule, call, {"q": shared, "k": shared}).backward()
    each = gradients(rule, call | {"k": call["q"]})
    assert shared.grad is not None
    assert_same_bits("q and k", shared.grad, each["q"] + each["k"])


@each_rule
def test_either_output_alone(rule: str, call: Call) -> None:
    """The other one's gradient is zero, and the parts add up."""
    leaves = leaves_of(call)
    o, state = RULES[rule][0](**(call | leaves | {"output_final_state": True}))
    parts = [torch.autograd.grad(x.sum(), list(leaves.values()), retain_graph=True) for x in (o, state)]
    both = torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()))
    for name, from_o, from_state, from_both in zip(leaves, *parts, both, strict=True):
        assert from_state.abs().sum() > 0 or name == "q", name
        torch.testing.assert_close(from_o + from_state, from_both, rtol=1e-4, atol=1e-4, msg=name)


@each_rule
def test_a_tangent_is_refused(rule: str, call: Call) -> None:
    def run(q: Tensor) -> Tensor:
        return loss_of(rule, call, {"q": q})

    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(run, (call["q"],), (torch.ones_like(call["q"]),))


@pytest.mark.parametrize(
    ("argument", "x"), [("gk", torch.zeros(2, 5, 4, 32)), ("gv", torch.zeros(2, 5, 4, 32)), ("beta", None)]
)
def test_what_the_chunked_rule_lacks_is_refused(argument: str, x: Tensor | None) -> None:
    call = draw_call("chunk_gated_delta_rule", 5)
    call |= {argument: call["v"].sigmoid() if x is None else x}
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match=f"fused_recurrent_gated_delta_rule: {argument}: expected"):
        torch_gdn.fused_recurrent_gated_delta_rule(**call)


def test_a_recurrent_call_without_gates(device: torch.device) -> None:
    """No decay, and a beta of one."""
    call = to_device(draw_call("chunk_gated_delta_rule", 20, same_keys=True), device)
    outer = draw_outer(call)
    gates = {"g": torch.zeros_like(call["g"]), "beta": torch.ones_like(call["beta"])}
    expected = gradients_of(torch_gdn.chunk_gated_delta_rule, call | gates, *outer, device)
    del call["g"], call["beta"]
    assert_same(
        gradients_of(torch_gdn.fused_recurrent_gated_delta_rule, call, *outer, device),
        {name: x for name, x in expected.items() if name not in gates},
    )


@each_rule
@pytest.mark.parametrize(("order", "other"), [("qkv", ""), ("vkq", ""), ("qkv", "k"), ("qkv", "v")])
def test_a_convolution_is_computed_again(rule: str, device: torch.device, order: str, other: str) -> None:
    """Its output is not kept if q, k and v are views of it, and the gradients have the bits of a call that keeps it."""
    call = to_device(draw_call(rule, 35, HV=2), device)
    heads = {name: call[name] for name in order}
    x = torch.cat([rows.flatten(2) for rows in heads.values()], -1).requires_grad_()
    weight = torch.linspace(-1, 1, 4 * x.shape[-1], device=device).view(-1, 4).requires_grad_()

    def gradients_of_x(change: Callable[[Tensor], Tensor]) -> tuple[bool, tuple[Tensor, ...]]:
        y, _ = torch_gdn.causal_conv1d(x, weight, activation="silu")
        rows = change(y).split([head.flatten(2).shape[-1] for head in heads.values()], -1)
        views = {name: part.view(heads[name].shape) for name, part in zip(heads, rows, strict=True) if name != other}
        o, _ = RULES[rule][0](**(call | views))
        kept = [saved.untyped_storage().data_ptr() for saved in o.grad_fn.saved_tensors if saved is not None]
        return y.untyped_storage().data_ptr() in kept, torch.autograd.grad((o * o).sum(), [x, weight])

    keeps, again = gradients_of_x(lambda y: y)
    keeps_changed, changed = gradients_of_x(lambda y: y.mul_(1))
    assert (keeps, keeps_changed) == (bool(other), True)
    for name, ours, expected in zip(("x", "weight"), again, changed, strict=True):
        assert_same_bits(name, ours, expected)


BYTES_PER_TOKEN = 115_000  # FLA's, with 32 heads of 128 x 128 in bfloat16
MEASURE = """
import sys
import torch, torch_gdn
heads = 32
torch.set_num_threads(2)
def resident(field):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1])
def step(T):
    q, k, v = (torch.ones(1, T, heads, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g, beta = -torch.rand(1, T, heads), torch.rand(1, T, heads)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again
    before = resident("VmRSS")
    o, _ = torch_gdn.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    torch.autograd.grad(o, [q, k, v], torch.ones_like(o))
    return resident("VmHWM") - before
step(64)
print(step(int(sys.argv[1])))
"""


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says how large a process was")
def test_peak_memory_per_token() -> None:
    """Above the inputs, of a forward and a backward pass; from one length to twice it, so that only tokens count."""
    peaks = []
    for T in (1024, 2048):
        result = subprocess.run([sys.executable, "-c", MEASURE, str(T)], capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout) * 1024)
    assert 0 < peaks[1] - peaks[0] < BYTES_PER_TOKEN * 1024, peaks
