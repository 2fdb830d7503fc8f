"""Compares what vLLM's plugin calls for a mixture of experts with loops in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.errors import assert_close
from tests.helpers.operations import CountedOperations
from torch_gdn import reference
from torch_gdn_check.registry.quantized import draw_packed
from torch_gdn_engines.vllm import moe

CPU = torch.device("cpu")
H, WIDTH, TOPK = 24, 20, 2


def inputs(tokens: int, experts: int) -> list[Tensor]:
    x, w13, w2 = torch.randn(tokens, H), torch.randn(experts, 2 * WIDTH, H), torch.randn(experts, H, WIDTH)
    return [x, w13, w2, torch.rand(tokens, TOPK), torch.rand(tokens, experts).topk(TOPK).indices.int()]


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_equals_float64(tokens: int, device: torch.device) -> None:
    given = inputs(tokens, 16)
    x, w13, w2, weights, ids = (tensor.double() if tensor.is_floating_point() else tensor for tensor in given)
    exact = reference.moe_down(reference.moe_gate_up(x, w13, ids)[0], w2, weights, ids)
    x, w13, w2, weights, ids = (tensor.to(device) for tensor in given)
    out = moe.fused_experts(x, moe.Matrix(w13), moe.Matrix(w2), weights, ids)
    assert_close("out", out, exact, 1e-6, head_dim=0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routes_as_topk_does(renormalize: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(5, 16).to(device)
    weights, ids = moe.topk_softmax(logits[:, :3], torch.zeros(5, 3, dtype=dtype), logits, logits, renormalize)
    expected = logits.cpu().double().softmax(-1).topk(3)
    assert ids.dtype == dtype and torch.equal(ids.cpu(), expected.indices.to(dtype))
    total = expected.values.sum(-1, keepdim=True) if renormalize else 1.0
    assert_close("weights", weights.cpu(), expected.values / total, 6e-7, head_dim=0)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_the_host_reads_no_tensor(tokens: int) -> None:
    """A fake tensor raises where its content is asked for."""
    with FakeTensorMode() as mode:
        x, w13, w2, weights, ids = (mode.from_tensor(tensor) for tensor in inputs(tokens, 16))
        out = moe.fused_experts(x, moe.Matrix(w13), moe.Matrix(w2), weights, ids)
    assert out.shape == (tokens, H)


# ---- with a shared expert: stand-ins of vLLM 0.32 with the members that the plugin asks for --------------------------


class UnquantizedLinearMethod: ...


class OurMethod:
    topk_indices_dtype = None


class PackedLinearMethod: ...


class ReplicatedLinear(torch.nn.Module):
    order = None

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight, self.bias = torch.randn(rows, columns).to(device), None
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class MergedColumnParallelLinear(ReplicatedLinear): ...


class RowParallelLinear(ReplicatedLinear): ...


class LoRALinear(ReplicatedLinear): ...


class SiluAndMul(torch.nn.Module): ...


class Qwen2MoeMLP(torch.nn.Module):
    def __init__(self, device: torch.device, size: int, width: int) -> None:
        super().__init__()
        self.act_fn = SiluAndMul()
        self.gate_up_proj = MergedColumnParallelLinear(2 * width, size, device)
        self.down_proj = RowParallelLinear(size, width, device)
        self.expert_gate = ReplicatedLinear(1, size, device)


class FusedTopKRouter:
    def select_experts(self, hidden_states: Tensor, router_logits: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        ids = torch.empty(len(router_logits), TOPK, dtype=torch.int32)
        return moe.topk_softmax(ids, ids, ids, router_logits, True)


def runner_on(device: torch.device, size: int = H, width: int = WIDTH) -> SimpleNamespace:
    w13, w2 = torch.randn(16, 2 * width, size), torch.randn(16, size, width)
    return SimpleNamespace(
        gate=ReplicatedLinear(16, size, device),
        router=FusedTopKRouter(),
        routed_experts=SimpleNamespace(w13_weight=w13.to(device), w2_weight=w2.to(device), quant_method=OurMethod()),
        _shared_experts=SimpleNamespace(_layer=Qwen2MoeMLP(device, size, width)),
        moe_config=SimpleNamespace(tp_size=1, pcp_size=1, dp_size=1, ep_size=1, sp_size=1),
        routed_scaling_factor=1.0,
        _fse_fuse_gate=False,
        routed_input_transform=None,
        routed_output_transform=None,
    )


def left_to_vllm(*_: object, **__: object) -> Tensor:
    raise NotImplementedError("the forward of vLLM")


CLASSES = moe.Classes(
    experts=(OurMethod,),
    unquantized=(UnquantizedLinearMethod,),
    packed=(PackedLinearMethod,),
    routers=(FusedTopKRouter,),
    shared=(Qwen2MoeMLP,),
    linears=(ReplicatedLinear, MergedColumnParallelLinear, RowParallelLinear),
    activations=(SiluAndMul,),
).learnt()
forward = moe.with_shared_expert(left_to_vllm, lambda: CLASSES)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_layer_with_a_shared_expert(tokens: int, device: torch.device) -> None:
    runner, x = runner_on(device), torch.randn(tokens, H)
    layer, shared = runner.routed_experts, runner._shared_experts._layer
    with CountedOperations() as counted:
        out = forward(runner, x.to(device), x.to(device))
    matrices = [layer.w13_weight, layer.w2_weight, shared.gate_up_proj.weight, shared.down_proj.weight]
    matrices += [shared.expert_gate.weight, runner.gate.weight]
    w13, w2, gate_up, down, gate, router = (weight.cpu().double() for weight in matrices)
    exact_x = x.double()
    weights, ids = reference.moe_router(exact_x @ router.T, TOPK)
    hidden, shared_hidden = reference.moe_gate_up(exact_x, w13, ids, *gate_up.chunk(2))
    exact = reference.moe_down(hidden, w2, weights, ids, shared_hidden, down, exact_x @ gate.T)
    assert_close("out", out.cpu(), exact, 1e-6, head_dim=0)
    if device.type == "mps" and tokens == 1:
        assert sum(counted.calls.values()) == 5, counted.calls


def pack(layer: Any, matrix: str, bits: int, device: torch.device) -> Tensor:
    """Gives the layer packed weights in place of others; returns them as numbers."""
    *rows, columns = getattr(layer, f"{matrix}weight").shape
    packed = draw_packed(*rows, columns=columns, bits=bits, group=32, dtype=torch.float32)
    for name, tensor in zip(("weight", "scales", "biases"), packed, strict=True):
        setattr(layer, f"{matrix}{name}", tensor.to(device))
    return reference.dequantize(*packed, bits, dtype=torch.float64)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shared_bits", [4, 8, None])
def test_packed_experts(shared_bits: int | None, device: torch.device) -> None:
    """A shared expert that is packed too, with as many bits or others, or one that is not."""
    runner, x = runner_on(device, 64, 32), torch.randn(5, 64)
    layer, shared = runner.routed_experts, runner._shared_experts._layer
    w13, w2 = (pack(layer, matrix, 4, device) for matrix in ("w13_", "w2_"))
    for each in (shared.gate_up_proj, shared.down_proj):
        each.numbers = each.weight.cpu().double()
        if shared_bits is not None:
            each.numbers = pack(each, "", shared_bits, device)
            each.quant_method = PackedLinearMethod()
    out = forward(runner, x.to(device), x.to(device))
    exact_x, router, gate = x.double(), runner.gate.weight.cpu().double(), shared.expert_gate.weight.cpu().double()
    weights, ids = reference.moe_router(exact_x @ router.T, TOPK)
    gate_proj, up_proj = shared.gate_up_proj.numbers.chunk(2)
    hidden, shared_hidden = reference.moe_gate_up(exact_x, w13, ids, gate_proj, up_proj)
    exact = reference.moe_down(hidden, w2, weights, ids, shared_hidden, shared.down_proj.numbers, exact_x @ gate.T)
    assert_close("out", out.cpu(), exact, 1e-6, head_dim=0)


def pack_shared(runner: Any) -> None:
    down = runner._shared_experts._layer.down_proj
    down.scales, down.biases, down.quant_method = torch.zeros(H, 1), torch.zeros(H, 1), PackedLinearMethod()


def hook(name: str) -> Any:
    def change(runner: Any) -> None:
        runner._shared_experts._layer.get_submodule(name).register_forward_hook(lambda *_: None)

    return change


def derive(name: str) -> Any:
    """Gives a module a class that derives from its own."""

    def change(runner: Any) -> None:
        module = runner._shared_experts._layer.get_submodule(name)
        module.__class__ = type(type(module).__name__, (type(module),), {})

    return change


CHANGES = {
    **{f"a hook of {name or 'the expert'}": hook(name) for name in ("", "act_fn", "gate_up_proj", "expert_gate")},
    **{f"another class of {name or 'the expert'}": derive(name) for name in ("", "act_fn", "down_proj")},
    "another router": lambda runner: setattr(runner, "router", type("FusedTopKRouter", (FusedTopKRouter,), {})()),
    "another method": lambda runner: setattr(runner.routed_experts, "quant_method", object()),
    "no shared expert": lambda runner: setattr(runner, "_shared_experts", None),
    "two ranks": lambda runner: setattr(runner.moe_config, "tp_size", 2),
    "a scale": lambda runner: setattr(runner, "routed_scaling_factor", 2.5),
    "an adapter": lambda runner: setattr(runner._shared_experts._layer, "down_proj", LoRALinear(H, WIDTH, CPU)),
    "a packed shared expert alone": pack_shared,
    "quantised": lambda runner: setattr(runner._shared_experts._layer.expert_gate, "quant_method", object()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_layers_are_left_to_vllm(change: str) -> None:
    runner, x = runner_on(CPU), torch.randn(3, H)
    forward(runner, x, x)
    CHANGES[change](runner)
    with pytest.raises(NotImplementedError, match="the forward of vLLM"):
        forward(runner, x, x)
