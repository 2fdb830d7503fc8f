"""Tests torch.compile and torch.export with a whole layer: one graph for one token, and one for any larger number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.helpers.devices import inductor_runs, kernels_run
from tests.helpers.layer import KERNELS, Layer, Served, inputs, layer_on
from torch_gdn_check.registry import REGISTRY

pytestmark = pytest.mark.sweep(6)

Backend = str


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backends() -> list[Any]:
    return [
        pytest.param("cpu", "inductor", id="cpu-inductor"),
        pytest.param("cpu", "aot_eager", id="cpu-aot_eager"),
        pytest.param("mps", "aot_eager", id="mps-aot_eager"),
        pytest.param("mps", "inductor", id="mps-inductor"),
    ]


def compiled_layer(name: str, backend: Any, kind: type[Layer] = Layer) -> tuple[torch.device, Layer, Any]:
    from tests.helpers.devices import ready

    device = ready(name)
    layer = layer_on(device, kind)
    return device, layer, torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)


def assert_same(device: torch.device, layer: Layer, compiled: Any, tokens: int) -> None:
    """Compares the output, the new state and the updated columns."""
    x, columns, state = inputs(tokens, device)
    written = columns.clone()
    kernel = "fused_recurrent_gated_delta_rule" if tokens < 16 else "fused_chunk_gated_delta_rule"
    with kernels_run(device, *KERNELS, kernel):
        results = compiled(x, written, state)
    expected = layer(x, columns, state)
    for ours, theirs in zip((*results, written), (*expected, columns), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "backend"), backends())
def test_a_layer_has_no_graph_break_and_at_most_two_graphs(name: str, backend: Backend) -> None:
    counter = CompileCounterWithBackend(backend)
    device, layer, compiled = compiled_layer(name, counter)
    with inductor_runs(name):
        for tokens in (65, 1, 130, 7, 2, 1, 64):
            assert_same(device, layer, compiled, tokens)
        assert counter.frame_count == 2


@pytest.mark.parametrize(("name", "backend"), backends())
@pytest.mark.parametrize("tokens", [1, 20])
def test_in_place_ops_between_two_reads(name: str, backend: Backend, tokens: int) -> None:
    """The pools are read before and after the ops that update them, and every read must see the right version."""
    device, layer, compiled = compiled_layer(name, backend, Served)
    with inductor_runs(name):
        x, *pools = inputs(tokens, device, batch=3)
        indices = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
        on_device, versions = [pool.clone() for pool in pools], [pool._version for pool in pools]
        result = compiled(x, *on_device, indices)
        expected = layer(x, *pools, indices)
    for ours, theirs in zip((*result, *on_device), (*expected, *pools), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    for pool, version, before in zip(pools, versions, inputs(tokens, device, batch=3)[1:], strict=True):
        assert pool._version > version
        assert torch.equal(pool[1], before[1]), "the slot of no sequence"
        assert not torch.equal(pool[0], before[0])


def test_an_in_place_op_on_a_tensor_of_the_graph() -> None:
    """The state is no input of the graph, and its old value is read later."""

    def grow(x: Tensor, weight: Tensor, pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = pool * 2
        view = doubled[:2]
        y = torch.ops.gdn.causal_conv1d_update_(x, weight, view)
        return y, doubled, pool * 3

    x, weight, pool = torch.randn(2, 3, 8), torch.randn(8, 4), torch.randn(4, 8, 3)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        result = torch.compile(grow, fullgraph=True, backend=backend)(x, weight, pool)
        for ours, theirs in zip(result, grow(x, weight, pool), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_exports(device: torch.device, tokens: int) -> None:
    layer = layer_on(device)
    length = {1: torch.export.Dim("tokens", min=2, max=4096)} if tokens > 1 else None
    example = inputs(tokens, device)
    exported = torch.export.export(layer, example, dynamic_shapes=(length, None, None)).module()
    for here in (tokens,) if tokens == 1 else (tokens, 65, 7):
        x, columns, state = inputs(here, device)
        written = columns.clone()
        results, expected = exported(x, written, state), layer(x, columns, state)
        for ours, theirs in zip((*results, written), (*expected, columns), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class OneOp(torch.nn.Module):
    def __init__(self, op: str, constants: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.constants = op, constants

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return REGISTRY[self.op].run({**tensors, **self.constants})


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("op", "packed"), [(op, packed) for op, entry in REGISTRY.items() for packed in sorted({False, entry.packable})]
)
def test_every_op_exports(op: str, packed: bool) -> None:
    call = REGISTRY[op].smallest(packed=packed)
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    module = OneOp(op, {name: value for name, value in call.items() if name not in tensors})
    again = {name: value.clone() for name, value in tensors.items()}
    exported = torch.export.export(module, (tensors,)).module()
    results, expected = exported(tensors), module(again)
    if not isinstance(results, tuple):  # an op that returns nothing has None on both sides
        results, expected = ([] if x is None else [x] for x in (results, expected))
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, again[name], rtol=0, atol=0, msg=f"{name} was updated in place")
