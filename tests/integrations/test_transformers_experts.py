"""Tests mixtures of experts in transformers' models: the same tokens, no histc, five launches, active bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.errors import assert_close
from tests.helpers.operations import CountedOperations
from tests.integrations import models
from tests.integrations.models import random_model, torch_gdn_enabled
from torch_gdn.integrations.transformers import experts, supports
from torch_gdn.integrations.transformers.small_models import make as convolving_model

SPARSE = {"num_experts": 8, "num_experts_per_tok": 2}
KINDS = [kind for kind in ("qwen3_next", "qwen3_5_moe") if models.available(kind)]
pytestmark = pytest.mark.skipif(experts.interface() is None, reason="this transformers has no experts functions")


def generate(model: Any, device: torch.device, **options: Any) -> list[list[int]]:
    tokens = models.random_tokens(2, 12).to(device)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True} | options
    result = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
    return [row[12:] for row in result.tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@torch.no_grad()
def test_tokens_are_transformers_own_without_histc(kind: str, options: dict[str, Any]) -> None:
    model = random_model(kind, **SPARSE)
    expected = generate(copy.deepcopy(model), torch.device("cpu"), **options)
    device = ready("mps")
    model.to(device)
    with torch_gdn_enabled() as transformers, CountedOperations() as counted:
        assert generate(model, device, **options) == expected
    status = transformers.status()
    layers = model.config.num_hidden_layers
    assert status.ran["moe_block"] == 5 * layers and not status.fallbacks
    assert not counted.calls.keys() & {"histc", "_grouped_mm"}
    assert counted.calls["moe_down"] == 5 * layers


@pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_block_takes_five_launches_and_reads_active_experts_once(kind: str) -> None:
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    device = ready("mps")
    block = random_model(kind, torch.bfloat16, num_hidden_layers=1, layer_types=["full_attention"], **sizes, **SPARSE)
    block = block.model.layers[0].mlp.to(device)
    x = torch.randn(1, 1, 1024).to(torch.bfloat16).to(device)
    with torch_gdn_enabled(), profiled(detailed=True) as profile, CountedOperations() as counted:
        block(x)
    assert sum(counted.calls.values()) == 5, counted.calls
    kernels = profile.kernels
    assert sum(each.dispatches for each in kernels.values()) == 3
    issued = sum(each.device_bytes_issued_read + each.device_bytes_issued_written for each in kernels.values())
    active = (2 + 1) * 3 * 1024 * 256 * 2
    assert active <= issued <= 1.05 * active


def some_experts(kind: str, device: torch.device) -> tuple[Any, Tensor, Tensor, Tensor]:
    block = random_model(kind, **SPARSE).model.layers[0].mlp.experts.to(device)
    ids = torch.tensor([[1, 3], [3, 1], [7, 0]], device=device)
    return block, torch.randn(3, 64).to(device), ids, torch.rand(3, 2).to(device)


@pytest.mark.parametrize("name", [*experts.IMPLEMENTATIONS, experts.NAME])
@torch.no_grad()
def test_experts_by_each_name(device: torch.device, name: str) -> None:
    """Calls experts as models without a replaced block do. On the CPU they are ours only if our name asks for them."""
    module, *call = some_experts(KINDS[0], device)
    hidden, ids, weights = (x.cpu() for x in call)
    eager = type(module).forward.__wrapped__
    exact = eager(copy.deepcopy(module).cpu().double(), hidden.double(), ids, weights.double())
    with torch_gdn_enabled() as transformers:
        module.config._experts_implementation = name
        result = module(*call)
        ran = transformers.status().ran.get("experts", 0)
    assert_close(name, result.cpu(), exact, 1e-6, head_dim=None)
    assert ran == (device.type == "mps" or name == experts.NAME)


def test_a_model_chooses_the_implementation_and_disable_forgets_it() -> None:
    model = random_model(KINDS[0], **SPARSE)
    before = dict(experts.interface().items())
    with torch_gdn_enabled() as transformers:
        model.set_experts_implementation(experts.NAME)
        with torch.no_grad():
            models.prefill(model, torch.device("cpu"))
        assert transformers.status().ran["moe_block"] == 2
        assert "experts: grouped_mm, torch_gdn, batched_mm" in transformers.status().details()
    assert dict(experts.interface().items()) == before


@torch.no_grad()
def test_a_users_own_function_of_experts_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that torch_gdn computes as a whole would not call it."""
    model, device = random_model(KINDS[0], **SPARSE), ready("mps")
    functions, name = experts.interface(), model.config._experts_implementation
    original, calls = functions[name], []

    def halved(*args: Any) -> Tensor:
        calls.append(args)
        return original(*args) / 2

    with torch_gdn_enabled() as transformers:
        monkeypatch.setitem(type(functions)._global_mapping, name, halved)
        models.prefill(model.to(device), device)
        layers = model.config.num_hidden_layers
        assert len(calls) == layers
        assert transformers.status().fallbacks["moe_block"] == {f"the experts function {name} was replaced": layers}
        monkeypatch.undo()
        models.prefill(model, device)
        assert transformers.status().ran["moe_block"] == layers


GROUPS = {"num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
GROUPS |= {"routed_scaling_factor": 2.5, "num_hidden_layers": 2, "first_k_dense_replace": 0, "n_shared_experts": 2}
GROUPED_KINDS = [kind for kind in ("kimi_linear", "bailing_hybrid") if models.available(kind)]


def grouped_block(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    block = convolving_model(kind, **GROUPS).to(dtype).model.layers[1].mlp
    assert isinstance(block.gate.e_score_correction_bias, Tensor)
    for weight in (block.gate.weight, block.gate.e_score_correction_bias):  # some token chooses each expert
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    return block


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("kind", GROUPED_KINDS)
@torch.no_grad()
def test_blocks_with_groups_a_bias_and_a_shared_expert(kind: str, dtype: torch.dtype, most: float) -> None:
    device, block = ready("mps"), grouped_block(kind, dtype)
    x = torch.randn(2, 20, 64).to(dtype)
    exact = copy.deepcopy(block).double()
    exact.experts.config._experts_implementation = "eager"
    expected = exact(x.double())
    block.to(device)
    with torch_gdn_enabled() as transformers, CountedOperations() as counted:
        result = block(x.to(device))
    assert_close("block", result.cpu(), expected, most, head_dim=None)
    assert transformers.status().ran == {"moe_block": 1}
    assert sum(counted.calls.values()) == 4, counted.calls  # no float32 copy, though the router uses float32


@pytest.mark.skipif(not models.available("glm5_next"), reason="this transformers has no such model")
@torch.no_grad()
def test_a_block_with_a_limit_stays_transformers_and_status_says_so() -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMoE

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8, **GROUPS}
    configuration = Glm5NextTextConfig(**sizes)
    configuration._experts_implementation = "batched_mm"
    device, block = ready("mps"), Glm5NextTextMoE(configuration)
    for weight in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(weight, std=0.1) if weight.dim() > 1 else weight.zero_()
    x = torch.randn(1, 3, 64)
    expected = block(x)
    block.to(device)
    with torch_gdn_enabled() as transformers, pytest.warns(UserWarning, match="leaves experts to transformers"):
        assert_close("block", block(x.to(device)).cpu(), expected.double(), 1e-5, head_dim=None)
    assert "experts: 1 calls went to transformers: Glm5NextTextExperts has its own gate" in str(transformers.status())


LEFT = {
    "bias": ({"has_bias": True}, "the experts' has_bias is True"),
    "transposed": ({"is_transposed": True}, "the experts' is_transposed is True"),
    "interleaved": ({"is_concatenated": False}, "the experts' is_concatenated is False"),
    "parallel": ({"_is_expert_parallel": True}, "the experts' is_expert_parallel is True"),
    "activation": ({"act_fn": torch.nn.GELU()}, "torch_gdn does not know GELU at this place"),
}


@pytest.mark.parametrize("case", LEFT)
@torch.no_grad()
def test_experts_of_another_form_are_left(case: str) -> None:
    module, *call = some_experts(KINDS[0], torch.device("cpu"))
    different, reason = LEFT[case]
    assert supports("experts", module, *call) == (True, "")
    for name, value in different.items():
        setattr(module, name, value)
    assert supports("experts", module, *call) == (False, reason)


@torch.no_grad()
def test_blocks_with_other_layers_are_left() -> None:
    block = random_model(KINDS[0], **SPARSE).model.layers[0].mlp
    x = torch.zeros(1, 3, 64)
    assert supports("moe_block", block, x) == (True, "")
    block.shared_expert.up_proj.double()
    assert "shared_up_proj: expected dtype float32" in supports("moe_block", block, x)[1]
    block.shared_expert.up_proj = torch.nn.Sequential(torch.nn.Linear(64, 32))
    assert "torch_gdn does not know Sequential at this place" in supports("moe_block", block, x)[1]


@torch.no_grad()
def test_a_block_and_experts_compile_without_a_graph_break() -> None:
    model = random_model(KINDS[0], **SPARSE)
    block = model.model.layers[0].mlp
    x, ids, weights = torch.randn(1, 3, 64), torch.tensor([[1, 2], [0, 7], [2, 1]]), torch.rand(3, 2)
    with torch_gdn_enabled():
        model.set_experts_implementation(experts.NAME)
        for module, call in ((block, (x,)), (block.experts, (x[0], ids, weights))):
            compiled = torch.compile(module, fullgraph=True, backend="eager")
            assert torch.equal(compiled(*call), module(*call))
