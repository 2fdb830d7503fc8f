"""Tests that torch.compile takes both end-to-end ops without a graph break, with static and with dynamic lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from tests.helpers.cases import END_TO_END_OPS, make_case
from tests.helpers.devices import inductor_runs, ready
from tests.helpers.prefill import each_op
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@each_op("chunked")
def test_fullgraph_gives_the_same_bits(device: torch.device, op: str) -> None:
    case = make_case(70, B=2).to(device)
    compiled = torch.compile(END_TO_END_OPS[op], fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        compiled(*case.qkv, **case.options), END_TO_END_OPS[op](*case.qkv, **case.options), strict=True
    ):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", END_TO_END_OPS)
def test_inductor_on_mps(op: str) -> None:
    """The default backend's buffers follow the fake tensors' strides. test_compile_layer.py tests it on the CPU."""
    case = make_case(70, B=2).to(ready("mps"))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, state = END_TO_END_OPS[op](q.transpose(1, 2).transpose(1, 2), k, v, **case.options)
        assert state is not None
        return o + state.sum()

    with inductor_runs("mps"):
        result = torch.compile(layer, fullgraph=True)(*case.qkv)
    torch.testing.assert_close(result, layer(*case.qkv), rtol=1e-5, atol=1e-4)


@pytest.mark.sweep(4)
@each_op("chunked")
def test_one_graph_serves_every_length(device: torch.device, op: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(END_TO_END_OPS[op], fullgraph=True, backend=counter, dynamic=True)
    for T in (65, 70, 130, 7):
        case = make_case(T, B=2).to(device)
        o, _ = compiled(*case.qkv, **case.options)
        assert torch.equal(o, END_TO_END_OPS[op](*case.qkv, **case.options)[0])
    assert counter.frame_count == 1


@each_op("chunked")
def test_packed_sequences_on_the_device_are_not_read_by_the_compiler(device: torch.device, op: str) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150]).to(device)
    assert case.cu_seqlens is not None
    case.cu_seqlens = case.cu_seqlens.to(device)
    compiled = torch.compile(END_TO_END_OPS[op], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*case.qkv, **case.options)[0], END_TO_END_OPS[op](*case.qkv, **case.options)[0])


def test_an_input_that_requires_grad_is_an_error_when_compiled(device: torch.device) -> None:
    entry = REGISTRY["chunk_gated_delta_rule"]  # the op, whose function has gradients
    call = to_device(entry.smallest(), device)
    call["v"].requires_grad_()
    compiled = torch.compile(entry.overload, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="v: expected a tensor that does not require grad"):
        compiled(**call)


@pytest.mark.parametrize(
    "op", ["chunk_gated_delta_rule_", "fused_recurrent_gated_delta_rule_", "causal_conv1d_update_"]
)
def test_inductor_writes_to_the_callers_pool_and_copies_none(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool has gigabytes, and Inductor copies what it cannot prove safe to overwrite."""
    entry = REGISTRY[op]
    call, expected = (to_device(entry.smallest(), ready("mps")) for _ in range(2))
    graphs: list[torch.fx.Graph] = []
    monkeypatch.setattr(inductor_config, "post_grad_custom_post_pass", graphs.append)

    def layer(pool: Tensor, **others: Any) -> Any:
        return entry.overload(**others, state_pool=pool)

    with inductor_runs("mps"):
        torch.compile(layer, fullgraph=True)(call["state_pool"], **{k: x for k, x in call.items() if k != "state_pool"})
    entry.run(expected)
    assert torch.equal(call["state_pool"], expected["state_pool"])
    (graph,) = graphs
    (written,) = [node for node in graph.nodes if node.target is entry.overload]
    assert written.args[entry.arguments.index("state_pool")].op == "placeholder"
    copies = [node for node in graph.nodes if "copy" in str(node.target)]
    assert all(target is source for target, source in (node.args for node in copies))  # Inductor emits no code for it
    assert not any("clone" in str(node.target) for node in graph.nodes)
