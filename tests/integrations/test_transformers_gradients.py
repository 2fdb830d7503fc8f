"""Tests that models train with torch_gdn's gradients as they do with transformers' own code."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.devices import kernels_run, ready
from tests.helpers.errors import relative_error
from tests.integrations.models import KINDS, random_model, random_tokens, torch_gdn_enabled

STEPS = 50
RATES = {"full": 0.1, "LoRA": 0.03}  # at 0.1, steps of LoRA multiply the rounding errors of earlier ones
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
KIND = "qwen3_5" if "qwen3_5" in KINDS else "qwen3_next"


class LoRA(nn.Module):
    """Adds a product of two small matrices to a frozen layer."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x @ self.A.T @ self.B.T
        return y


def trainable(how: str) -> Any:
    model = random_model(KIND, **TWO_LAYERS)
    if how == "LoRA":
        torch.manual_seed(0)
        model.requires_grad_(False)
        layers = [(module, name, x) for module in model.modules() for name, x in module.named_children()]
        for module, name, layer in layers:
            if isinstance(layer, nn.Linear) and name in ("in_proj_qkv", "in_proj_qkvz", "out_proj", "q_proj"):
                setattr(module, name, LoRA(layer))
    return model


def losses(model: Any, how: str, device: torch.device) -> list[float]:
    model = copy.deepcopy(model).to(device)
    learned = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=RATES[how])
    tokens, result = random_tokens(2, 24).to(device), []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@cache
def losses_of_transformers(how: str) -> list[float]:
    return losses(trainable(how), how, torch.device("cpu"))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("how", ["full", "LoRA"])
def test_the_losses_are_those_of_transformers(device: torch.device, how: str) -> None:
    model, expected = trainable(how), losses_of_transformers(how)
    assert expected[-1] < expected[0] - 1e-3, "it learns"
    kernels: tuple[str, ...] = ("norm_bwd", "causal_conv1d_bwd", "chunk_gated_delta_rule_bwd_dhu")
    kernels += ("sum_partials",) if how == "full" else ()
    with torch_gdn_enabled() as transformers, kernels_run(device, *kernels), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = losses(model, how, device)
        ran = transformers.status().ran
    assert ran["causal_conv1d_fn"] == ran["rms_norm_gated"] == ran["chunk_gated_delta_rule"] == STEPS
    for x, y in zip(result, expected, strict=True):
        assert abs(x - y) < 1e-4


def test_each_parameter_has_the_gradient_of_transformers(device: torch.device) -> None:
    def gradients(model: Any, device: torch.device) -> dict[str, Tensor]:
        tokens = random_tokens(2, 40).to(device)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: x.grad.cpu().double() for name, x in model.named_parameters() if x.grad is not None}

    model = random_model(KIND)
    expected = gradients(copy.deepcopy(model).double(), torch.device("cpu"))
    with torch_gdn_enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = gradients(model.to(device), device)
    assert result.keys() == expected.keys()
    for name, x in result.items():
        assert relative_error(x, expected[name]) < 2e-5, name


def test_autocast_trains_on_torch_gdn_and_no_worse_than_transformers(device: torch.device) -> None:
    """The error of the gradients of all parameters, each relative to its norm, against those in float32."""

    def gradients(model: Any, device: torch.device, enabled: bool) -> list[Tensor]:
        tokens, model = random_tokens(3, 70).to(device), copy.deepcopy(model).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return [x.cpu() for x in torch.autograd.grad(loss, list(model.parameters()))]

    def error(result: list[Tensor]) -> float:
        return sum(relative_error(x, y.double()) ** 2 for x, y in zip(result, exact, strict=True))

    theirs = ours = 0.0
    for seed in range(3):
        model = random_model(KIND, seed=seed)
        exact, cpu = gradients(model, torch.device("cpu"), False), gradients(model, torch.device("cpu"), True)
        with torch_gdn_enabled() as transformers, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = gradients(model, device, True)
            ran = transformers.status().ran
        assert ran["causal_conv1d_fn"] == ran["rms_norm_gated"] == ran["chunk_gated_delta_rule"] == 1
        theirs, ours = theirs + error(cpu), ours + error(result)
    assert 0 < ours < 1.1**2 * theirs


LENGTHS = (40, 9, 70, 3)  # of the sequences, of which a step takes two


def changes(model: Any, how: str, folder: Path) -> dict[str, Tensor]:
    """Trains a copy with transformers' Trainer on the CPU. Returns how much each parameter changed in two steps."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 0}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trained = copy.deepcopy(model)
    Trainer(
        trained,
        TrainingArguments(str(folder), use_cpu=True, **options),
        data_collator=packed if how == "packed" else padded_on_the_right,
        train_dataset=[{"input_ids": random_tokens(n, seed=n).tolist()} for n in LENGTHS],
        optimizers=(torch.optim.SGD(trained.parameters(), lr=0.1), None),
    ).train()
    return {name: (x - model.get_parameter(name)).detach().double() for name, x in trained.named_parameters()}


def padded_on_the_right(sequences: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = [torch.tensor(each["input_ids"]) for each in sequences]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with 0, which is no sequence's token
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }


@pytest.mark.parametrize("how", ["packed", "padded on the right"])
def test_trainer_changes_each_parameter_as_without_packing(how: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    model = random_model(KIND)
    expected = changes(copy.deepcopy(model).double(), "padded on the right", tmp_path)
    with torch_gdn_enabled() as transformers:
        result = changes(model, how, tmp_path)
        status = transformers.status()
    assert status.ran["chunk_gated_delta_rule"] == status.ran["causal_conv1d_fn"] == 2
    assert "chunk_gated_delta_rule" not in status.fallbacks
    assert result.keys() == expected.keys()
    for name, x in result.items():
        rounding = 2 * 2**-24 * model.get_parameter(name).norm()  # of the parameter itself, at each step
        assert (x - expected[name]).norm() < 4e-5 * expected[name].norm() + rounding, name


@pytest.mark.parametrize("kind", [kind for kind in ("qwen3_next", "qwen3_5", "olmo_hybrid") if kind in KINDS])
def test_trainer_evaluates_in_autocast(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    from transformers import Trainer, TrainingArguments, training_args

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", ready("mps").type)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)  # transformers asks for macOS 14
    arguments = TrainingArguments(str(tmp_path), bf16=True, report_to="none", disable_tqdm=True)
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(2, 9)]
    trainer = Trainer(random_model(kind), arguments, eval_dataset=rows)
    expected = trainer.evaluate()["eval_loss"]
    with torch_gdn_enabled() as transformers:
        assert trainer.evaluate()["eval_loss"] == expected
        assert transformers.status().fallbacks and not transformers.status().ran
