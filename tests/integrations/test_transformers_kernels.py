"""Tests that `kernels` puts the layers of a local folder into the model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.devices import kernels_run, ready
from tests.integrations import models
from tests.integrations.models import distance, random_model
from torch_gdn.integrations.transformers import gguf_layers, kernel_mapping, known_forms
from torch_gdn.integrations.transformers.kernel_mapping import FOLDER, LAYERS
from torch_gdn.integrations.transformers.kernels import layers

CPU = torch.device("cpu")
NAMES = {  # a model's module names these functions differently from the layers
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
}
KINDS = [kind for kind in models.KINDS if models.there(kind)]


@pytest.fixture
def _put_back() -> Iterator[None]:
    """`kernels` cannot be undone, and changes functions that all models of a kind share."""
    yield
    for kind in KINDS:
        for function in vars(models.modeling_module(kind)).values():
            if isinstance(function, nn.Module):
                function.__dict__.pop("forward", None)


def in_the_model(kind: str, layer: str) -> Callable[..., Any]:
    module = models.modeling_module(kind)
    if hasattr(module, "is_fast_path_available"):
        pytest.skip("this transformers has no such place for kernels: it came with 5.16")
    if layer == "RMSNormGated":
        return known_forms.classes(module, layer)[0]
    return getattr(module, NAMES.get(layer, layer))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_arguments_of_what_it_replaces(kind: str, layer: str) -> None:
    original = in_the_model(kind, layer)
    theirs = getattr(original, "forward", original)  # a class has it; with kernels, a function does too
    wanted = [x for x in inspect.signature(theirs).parameters.values() if x.name != "self"]
    ours = list(inspect.signature(getattr(layers, layer).forward).parameters.values())[1:]
    assert [(x.name, x.kind) for x in ours] == [(x.name, x.kind) for x in wanted]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("qwen3_5")])
@pytest.mark.parametrize("layer", gguf_layers.LAYERS)
def test_a_whole_layer_has_the_arguments_of_what_it_replaces(kind: str, layer: str) -> None:
    (original,) = known_forms.classes(models.modeling_module(kind), "GatedDeltaNet")
    wanted, ours = (inspect.signature(x.forward).parameters.values() for x in (original, getattr(layers, layer)))
    assert [(x.name, x.kind) for x in ours] == [(x.name, x.kind) for x in wanted]


@pytest.mark.parametrize("layer", [*LAYERS, *gguf_layers.LAYERS])
def test_a_layer_has_no_state_and_no_method_but_forward(layer: str) -> None:
    found = getattr(layers, layer)
    assert found.__init__ is nn.Module.__init__
    assert {x for x, _ in inspect.getmembers(found)} - {x for x, _ in inspect.getmembers(nn.Module)} == {
        "can_torch_compile",
        "has_backward",
    }


def test_the_folder_is_what_kernels_reads() -> None:
    metadata = json.loads((FOLDER / "metadata.json").read_text())
    assert (metadata["name"], metadata["backend"]) == ("torch-gdn", {"type": "metal"})
    assert set(kernel_mapping()) == set(LAYERS)


@pytest.mark.parametrize("kind", [x for x in ("qwen3_next", "olmo_hybrid") if x in KINDS])
@pytest.mark.usefixtures("_put_back")
@torch.no_grad()
def test_a_kernelized_model_runs_the_metal_kernels(kind: str) -> None:
    in_the_model(kind, LAYERS[0])
    import transformers
    from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available

    if not is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} wants kernels {KERNELS_MIN_VERSION}, not installed here")
    expected = models.decode(random_model(kind), CPU, prompt=17, steps=(1,))
    device, model = ready("mps"), random_model(kind)  # kernels would not find a copy's functions
    model.to(device).set_use_kernels(True, transformers.KernelConfig(kernel_mapping(), use_local_kernel=True))
    rule = ("fused_chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    with kernels_run(device, *rule, "causal_conv1d", "rms_norm_gated"):
        found = models.decode(model, device, prompt=17, steps=(1,))
    assert distance(found, expected) < 4e-6
