"""Tests LoRA over a model file's packed 4-bit weights on mps: QLoRA. The packed layers stay frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import relative_error
from tests.integrations.models import random_model, random_tokens, torch_gdn_enabled
from tests.integrations.test_transformers_gradients import LoRA
from torch_gdn.integrations.transformers import versions
from torch_gdn.integrations.transformers.packed_layers import PackedLinear

pytest.importorskip("mlx.core", reason="the files are written with MLX, which is installed on Linux and on macOS alone")
if not versions.is_served(versions.installed()):
    pytest.skip("this transformers loads quantised files in another way", allow_module_level=True)
from tests.integrations import quantized_files

FORMS = {"mlx": "our LoRA", "awq": "LoRA", "gptq": "DoRA", "w4a16": "our LoRA"}  # gptq's columns are sorted by group
ENDINGS = ("_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z")
STEPS, RATE = 4, 0.2
CPU = torch.device("cpu")


def with_adapters(model: Any, kinds: tuple[type, ...], adapter: str) -> Any:
    """Freezes the model, and adds to each projection the same small matrices, none of which is zero."""
    if adapter != "our LoRA":
        peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'peft>=0.21'")
        options = {"r": 4, "lora_alpha": 1, "target_modules": "all-linear", "init_lora_weights": False}
        config = peft.LoraConfig(use_dora=adapter == "DoRA", **options)
        with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU
            torch.default_generator.manual_seed(0)
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            return peft.get_peft_model(model, config)
    model.requires_grad_(False)
    layers = [(name, x) for name, x in model.named_modules() if type(x) in kinds and name.endswith(ENDINGS)]
    for name, layer in layers:
        random = torch.Generator().manual_seed(len(name) + layer.in_features)
        adapter = LoRA(layer).to(layer.weight.device)
        adapter.A.data.copy_(torch.randn(adapter.A.shape, generator=random) / layer.in_features**0.5)
        adapter.B.data.copy_(0.1 * torch.randn(adapter.B.shape, generator=random))
        model.set_submodule(name, adapter)
    return model


def learned(model: Any) -> dict[str, nn.Parameter]:
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def steps(model: Any, device: torch.device) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yields the loss and the gradients of each step."""
    tokens, parameters = random_tokens(2, 40).to(device), learned(model)
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        yield loss.item(), {name: x.grad.cpu().double() for name, x in parameters.items() if x.grad is not None}
        optimizer.step()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("form", "adapter"), FORMS.items())
def test_adapters_of_packed_layers_learn_as_those_of_the_numbers(form: str, adapter: str, tmp_path: Path) -> None:
    """Losses and gradients are those of the dequantised model in float64, and no packed tensor changes."""
    from transformers import AutoModelForCausalLM

    device = ready("mps")
    write = quantized_files.write_mlx if form == "mlx" else quantized_files.write
    twin = write(random_model("qwen3_5"), tmp_path, *([] if form == "mlx" else [form]))
    exact = with_adapters(copy.deepcopy(twin), (nn.Linear,), adapter).double()
    expected = list(steps(exact, CPU))
    with torch_gdn_enabled() as transformers, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="mps", dtype=torch.float32)
        model = with_adapters(model, (PackedLinear, nn.Linear), adapter)
        packed = {name: x for name, x in model.named_modules() if type(x) is PackedLinear}
        before = {name: [x.clone() for x in layer.parameters()] for name, layer in packed.items()}
        with kernels_run(device, "quantized_linear", "dequantize"):
            result = list(steps(model, device))
        ran = transformers.status().ran
    assert len(packed) > 5 and ran["chunk_gated_delta_rule"] == STEPS
    assert result[0][1].keys() == expected[0][1].keys() and len(result[0][1]) > 10
    for (loss, gradients), (exact_loss, exact_gradients) in zip(result, expected, strict=True):
        assert abs(loss - exact_loss) < 1e-5
        for name, x in gradients.items():
            assert relative_error(x, exact_gradients[name]) < 2e-5, name
    assert result[-1][0] < result[0][0] - 1e-3, "it learns"
    if adapter != "our LoRA":
        with pytest.raises(ValueError, match=r"^merge: adapters of packed layers \(PackedLinear\) cannot be merged"):
            model.merge_and_unload(safe_merge=True)
    for name, layer in packed.items():
        assert all(torch.equal(x, y) for x, y in zip(layer.parameters(), before[name], strict=True)), name


@pytest.mark.parametrize("kind", ["olora", "pissa", "LoHa"])
def test_adapters_that_read_the_weights_are_refused(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'peft>=0.21'")
    quantized_files.write_mlx(random_model("qwen3_5"), tmp_path)
    with torch_gdn_enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=ready("mps"), dtype=torch.float32)
        names = ["q_proj", "in_proj_z"]
        if kind == "LoHa":
            config = peft.LoHaConfig(target_modules=names)
        else:
            config = peft.LoraConfig(target_modules=names, init_lora_weights=kind)
        with pytest.raises(ValueError, match=r"^peft_config: expected LoRA with .*, over packed layers"):
            peft.get_peft_model(model, config)


def test_packed_experts_refuse_to_train(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    device = ready("mps")
    quantized_files.write_mlx(random_model("qwen3_5_moe"), tmp_path)
    with torch_gdn_enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="mps", dtype=torch.float32)
        model = with_adapters(model, (PackedLinear,), "our LoRA")
        with pytest.raises(RuntimeError, match=r"^packed experts: no gradient passes through them"):
            next(steps(model, device))
