"""Tests MLPs and attention layers of transformers' models on mps: fewer launches give the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.devices import ready
from tests.helpers.errors import assert_close
from tests.helpers.operations import CountedOperations
from tests.integrations.models import available, distance, random_model, random_tokens, torch_gdn_enabled
from torch_gdn.integrations.transformers import attention, decoder_layers, supports
from torch_gdn.integrations.transformers.patches import modeling_module

KINDS = [kind for kind in ("qwen3_next", "qwen3_5", "olmo_hybrid", "lara_mini") if available(kind)]
GATED = [kind for kind in KINDS if kind in ("qwen3_next", "qwen3_5")]
LAYERS = dict.fromkeys(("qwen3_next", "lara_mini"), "model.layers.1.mlp.shared_expert")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
pytestmark = pytest.mark.usefixtures("forward_only")


@pytest.fixture
def forward_only() -> Any:
    with torch.no_grad():
        yield


def mlp_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return random_model(kind, dtype).get_submodule(LAYERS.get(kind, "model.layers.1.mlp"))


def attention_call(
    kind: str, dtype: torch.dtype = torch.float32, index: int = 1, rotates: bool = True
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a layer, and five tokens of two sequences with the model's own tables."""
    model = random_model(kind, dtype).model
    x = torch.randn(2, 5, 64).to(dtype)
    tables = model.rotary_emb(x, torch.arange(5).expand(2, -1))
    return model.layers[index].self_attn, (x, tables if rotates else None, None)


def moved(call: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(None if x is None else x.to(device) if isinstance(x, Tensor) else moved(x, device) for x in call)


def compared(layer: Any, call: tuple[Any, ...], exact: Tensor, device: torch.device) -> tuple[CountedOperations, Any]:
    """Asserts that the layer on the device is as close to the exact result as its own code on the CPU."""
    own = first(layer(*call))
    layer_there, call_there = copy.deepcopy(layer).to(device), moved(call, device)
    with torch_gdn_enabled() as transformers, CountedOperations() as counted:
        result = first(layer_there(*call_there))
    result = result.cpu()
    assert result.dtype == own.dtype
    if own.dtype == torch.float32:
        assert_close("y", result, exact, 2e-6, head_dim=None)
    else:
        assert 0 < distance(result, exact) <= 1.05 * distance(own, exact)
    return counted, transformers.status()


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    layer, x = mlp_of(kind, dtype), torch.randn(4, 50, 64).to(dtype)
    exact = copy.deepcopy(layer).double()(x.double())
    counted, status = compared(layer, (x,), exact, device)
    if device.type == "mps":
        assert counted.calls["act_and_mul"] == status.ran["mlp"] == 1 and sum(counted.calls.values()) == 4
    else:
        assert not status.ran


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_attention_layer(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    layer, call = attention_call(kind, dtype)
    x, tables, _ = call
    exact = copy.deepcopy(layer).double()(x.double(), tuple(each.double() for each in tables), None)[0]
    counted, status = compared(layer, call, exact, device)
    function = "rotation" if kind == "olmo_hybrid" else "attention"
    if device.type == "mps":
        assert status.ran[function] == counted.calls["qk_norm_rope"] == 1
        assert counted.calls["act_and_mul"] == (kind in GATED)
        assert not counted.calls.keys() & {"sigmoid", "cos", "neg", "rsqrt"}
    else:
        assert not status.ran


@pytest.mark.skipif(not available("lara_mini"), reason="this transformers has no lara_mini")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_without_a_rotation(dtype: torch.dtype) -> None:
    """Lara's full attention gets no tables. The norms of q and k are one launch nevertheless."""
    layer, call = attention_call("lara_mini", dtype, index=2, rotates=False)
    exact = copy.deepcopy(layer).double()(call[0].double(), None, None)[0]
    counted, status = compared(layer, call, exact, ready("mps"))
    assert status.ran["attention"] == counted.calls["qk_norm_rope"] == 1
    assert not counted.calls.keys() & {"sigmoid", "cos", "neg", "rsqrt", "rms_norm"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("rope", [{}, YARN, {"rope_type": "linear", "factor": 2.0}], ids=["plain", "yarn", "linear"])
@pytest.mark.parametrize("kind", GATED)
def test_every_rotation_of_a_model(kind: str, rope: dict[str, Any]) -> None:
    """Part of a head rotates, with scaled angles, and for Qwen3.5 with positions of time, height and width."""
    device = ready("mps")
    base = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    model = random_model(kind, rope_parameters=base | {"rope_type": "default"} | rope)
    positions = torch.stack([torch.arange(0, 40 * step, step) for step in (1, 1, 3, 2)])[:, None]
    call = {"position_ids": positions if kind == "qwen3_5" else positions[2], "use_cache": False}
    tokens = random_tokens(1, 40)
    expected = model(input_ids=tokens, **call).logits
    straight = model(input_ids=tokens, use_cache=False).logits
    assert distance(straight, expected) > 1e-3  # the positions matter
    model.to(device)
    with torch_gdn_enabled() as transformers:
        result = model(input_ids=tokens.to(device), **(call | {"position_ids": call["position_ids"].to(device)})).logits
    assert transformers.status().ran["attention"] == 1
    assert_close("logits", result.cpu(), expected.double(), 2e-5, head_dim=None)


@pytest.mark.parametrize("index", [0, 1], ids=["delta net", "attention"])
@pytest.mark.parametrize("kind", GATED)
def test_a_decoder_layer_is_no_further_from_float32(kind: str, index: int) -> None:
    model = random_model(kind, torch.bfloat16).model
    layer, x = model.layers[index], 10 * torch.randn(2, 50, 64).bfloat16()
    tables = model.rotary_emb(x, torch.arange(50).expand(2, -1))
    wide = copy.deepcopy(layer).float()  # with other numbers the router would tie
    exact = wide(x.float(), position_embeddings=tuple(table.float() for table in tables)).double()
    own = distance(layer(x, position_embeddings=tables), exact)
    device = ready("mps")
    layer.to(device)
    with torch_gdn_enabled() as transformers:
        result = layer(x.to(device), position_embeddings=moved(tables, device))
        seen: list[tuple[Tensor, Tensor]] = []
        hook = layer.mlp.register_forward_hook(lambda module, args, y: seen.append((args[0], first(y))))
        apart = layer(x.to(device), position_embeddings=moved(tables, device))
        hook.remove()
        ((given, y),) = seen
        assert torch.equal(first(layer.mlp(given)), y)  # without adding the residual
    assert transformers.status().ran["decoder_layer"] == 2
    assert distance(apart, exact) <= 1.05 * own
    assert 0 < distance(result, exact) <= 1.05 * own
    layer.post_attention_layernorm.register_forward_hook(lambda *_: None)
    assert supports("decoder_layer", layer, x) == (
        False,
        f"a hook of {type(layer.input_layernorm).__name__} must be called",
    )


def test_layers_of_another_form_are_left() -> None:
    layer, call = attention_call(GATED[0])
    assert supports("attention", layer, *call) == (True, "")
    assert "the cos and sin tables" in supports("attention", layer, call[0], tuple(x[0] for x in call[1]))[1]
    for tables in (None, call[1][:1], torch.stack(call[1])):
        assert "not a pair of cos and sin" in supports("attention", layer, call[0], tables)[1]
    layer.k_norm.eps = 1e-3
    assert supports("attention", layer, *call) == (False, "the norms of q and k differ")
    layer.k_norm.eps = layer.q_norm.eps
    assert "at most D / 2 pairs" in supports("attention", layer, call[0], (torch.zeros(2, 5, 66),) * 2)[1]
    block, x = mlp_of(GATED[0]), torch.zeros(2, 64)
    assert supports("mlp", block, x) == (True, "")
    assert "dtype" in supports("mlp", block, x.double())[1]
    block.act_fn = nn.GELU()
    assert supports("mlp", block, x) == (False, "torch_gdn does not know GELU at this place")
    rotated = torch.zeros(1, 2, 5, 64), torch.zeros(1, 1, 5, 64), *torch.zeros(2, 1, 5, 32)
    assert supports("rotation", *rotated) == (True, "")
    assert "after sin are positional" in supports("rotation", *rotated, None)[1]
    assert "unsqueeze_dim 2" in supports("rotation", *rotated, unsqueeze_dim=2)[1]
    assert "at most D / 2 pairs" in supports("rotation", *rotated[:2], *torch.zeros(2, 1, 5, 66))[1]
    assert "several devices" in supports("rotation", *rotated[:2], *torch.zeros(2, 1, 5, 32, device="meta"))[1]
    with torch.enable_grad():
        assert "grad mode is on" in supports("attention", layer, *call)[1]


def test_compiled_graphs_stay_with_transformers() -> None:
    device = ready("mps")
    layer, call = attention_call(GATED[0])
    block, x = mlp_of(GATED[0]), torch.randn(2, 64)
    with torch_gdn_enabled() as transformers:
        for module, given in ((layer, call), (block, (x,))):
            torch.compile(module.to(device), fullgraph=True, backend="eager")(*moved(given, device))
        assert not transformers.status().ran


def test_a_class_of_another_form_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = modeling_module(GATED[0])
    owner = next(each for each in vars(module).values() if getattr(each, "__name__", "").endswith("NextMLP"))

    class ClampedMLP(owner):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))

    assert decoder_layers.is_known_mlp(owner) and not decoder_layers.is_known_mlp(ClampedMLP)
    assert not attention.is_known(nn.MultiheadAttention)
    monkeypatch.setattr(ClampedMLP, "__module__", module.__name__)
    monkeypatch.setattr(module, "ClampedMLP", ClampedMLP, raising=False)
    with torch_gdn_enabled() as transformers:
        assert "ClampedMLP" in transformers.status().unknown[GATED[0]]
        named = ", ".join(transformers.status().unknown[GATED[0]])
        assert f"{GATED[0]}: {named}: left to transformers" in transformers.status().details()
    assert not transformers.status().unknown
