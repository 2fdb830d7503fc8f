"""Compares Kimi Delta Attention of transformers' models on torch_gdn with their own PyTorch fallback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import kernels_run, ready
from tests.helpers.kda import kda_inputs
from tests.integrations.models import distance, torch_gdn_enabled
from tests.integrations.test_transformers_convolutions import logits
from torch_gdn.integrations.transformers import supports
from torch_gdn.integrations.transformers.functions import KDA_FUNCTIONS
from torch_gdn.integrations.transformers.patches import KDA_IN_THE_MODULE, KDA_MODELS, modeling_module
from torch_gdn.integrations.transformers.small_models import make as random_model

each_model = pytest.mark.parametrize("model", KDA_MODELS)
each_function = pytest.mark.parametrize("function", KDA_IN_THE_MODULE)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def module_of(model: str) -> ModuleType:
    module = modeling_module(model)
    if module is None:
        pytest.skip(f"this transformers has no {model}")
    return module


def call(T: int, **changed: Any) -> dict[str, Any]:
    """Makes a call like the models': q, k and v are views of one tensor, g is float32."""
    inputs = kda_inputs(T, 32, 32, H=2, HV=2) | changed
    q, k, v = torch.cat([inputs[name].flatten(2) for name in "qkv"], -1).split(64, -1)
    heads = {name: x.view(1, T, 2, 32) for name, x in (("query", q), ("key", k), ("value", v))}
    given = {name: inputs[name] for name in ("g", "beta", "initial_state")}
    return heads | given | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def taken(module: ModuleType, function: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the function's results. Asserts that torch_gdn computed them."""
    with torch_gdn_enabled() as transformers:
        result = getattr(module, function)(**arguments)
        assert transformers.status().ran == {KDA_IN_THE_MODULE[function]: 1}
    assert isinstance(result, tuple)
    return result


@pytest.mark.sweep(4)
@pytest.mark.parametrize("T", [1, 64, 100])
@each_function
@each_model
def test_output_and_state_are_those_of_the_fallback(model: str, function: str, T: int) -> None:
    module, arguments = module_of(model), call(T)
    expected_o, expected_state = getattr(module, function)(**arguments)
    o, state = taken(module, function, arguments)
    assert distance(o, expected_o) < 1e-6
    assert distance(state, expected_state) < 1e-6


@each_function
def test_in_bf16_as_near_to_f32_as_the_fallback(function: str) -> None:
    module, arguments = module_of("kimi_linear"), call(100)
    narrow = {name: x.bfloat16() if name in ("query", "key", "value", "beta") else x for name, x in arguments.items()}
    wide = {name: x.float() if isinstance(x, Tensor) else x for name, x in narrow.items()}
    exact = getattr(module, function)(**wide)[0]
    fallback = distance(getattr(module, function)(**narrow)[0], exact)
    assert fallback > 1e-4 and distance(taken(module, function, narrow)[0], exact) < 1.05 * fallback


def test_packed_sequences_are_kept_apart() -> None:
    """The models pass on `cu_seq_lens_q`, which the fallback does not read."""
    module, arguments = module_of("kimi_linear"), call(20)
    arguments["initial_state"] = torch.randn(2, 2, 32, 32)
    boundaries = torch.tensor([0, 7, 20], dtype=torch.int32)
    o, state = taken(module, "chunk_kimi_delta_attention", arguments | {"cu_seq_lens_q": boundaries})
    for n, (first, last) in enumerate(((0, 7), (7, 20))):
        part = {name: arguments[name][:, first:last] for name in ("query", "key", "value", "g", "beta")}
        alone = arguments | part | {"initial_state": arguments["initial_state"][n : n + 1]}
        expected_o, expected_state = module.chunk_kimi_delta_attention(**alone)
        assert distance(o[:, first:last], expected_o) < 1e-6
        assert distance(state[n : n + 1], expected_state) < 1e-6


def test_on_mps_prefill_and_decode_run_the_kernels() -> None:
    module_of("kimi_linear")
    device, model = ready("mps"), random_model("kimi_linear")
    expected = logits(model)
    model = copy.deepcopy(model).to(device)
    kernels = ("fused_recurrent_gated_delta_rule", "causal_conv1d", "causal_conv1d_update")
    with torch_gdn_enabled() as transformers, kernels_run(device, *kernels):
        result = logits(model)
        status = transformers.status()
    assert distance(result, expected) < 4e-6
    assert [status.ran[name] for name in KDA_FUNCTIONS] == [1, 3] and not status.fallbacks


def test_training_leaves_the_recurrence_to_transformers() -> None:
    module, arguments = module_of("kimi_linear"), call(5)
    arguments["query"] = arguments["query"].clone().requires_grad_()
    with torch.enable_grad(), torch_gdn_enabled() as transformers, pytest.warns(UserWarning, match="requires grad"):
        module.recurrent_kimi_delta_attention(**arguments)[0].sum().backward()
        assert not transformers.status().ran
    assert arguments["query"].grad is not None


@pytest.mark.parametrize("function", KDA_IN_THE_MODULE.values())
def test_supports_gives_the_reason(function: str) -> None:
    arguments = call(5)
    assert supports(function, **arguments) == (True, "")
    for reason, change in (
        ("g: expected shape", {"g": arguments["g"][..., 1:]}),
        (
            "q: expected dtype bfloat16, float16 or float32",
            {name: arguments[name].double() for name in ("query", "key", "value")},
        ),
        ("query and value have the dtypes float32 and bfloat16", {"value": arguments["value"].bfloat16()}),
        ("packed sequences have seq_idx", {"seq_idx": torch.zeros(1, 5)}),
    ):
        answer, why = supports(function, **(arguments | change))
        assert not answer and why.startswith(reason), why
