"""Tests that a whole transformers model on the simulated device, by CPU fallback, gives the CPU's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mps_simulator


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).eval()
    on_mps = Qwen3NextForCausalLM(config).eval()
    on_mps.load_state_dict(model.state_dict())
    return {"cpu": model, "mps": on_mps.to("mps")}


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(0, 128, (1, 70), generator=torch.Generator().manual_seed(1))


def generate(models: dict[str, Any], device: str, prompt: torch.Tensor, **options: Any) -> list[list[int]]:
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    torch.manual_seed(5)
    with torch.no_grad():
        tokens = models[device].generate(prompt.to(device), max_new_tokens=4, **options)
    assert tokens.device.type == device
    return tokens[:, prompt.shape[1] :].tolist()


def test_forward(models: dict[str, Any], prompt: torch.Tensor) -> None:
    with torch.no_grad():
        expected = models["cpu"](prompt).logits
        logits = models["mps"](prompt.to("mps")).logits
    assert logits.is_mps
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert expected.norm() > 1


def test_sampled(models: dict[str, Any], prompt: torch.Tensor) -> None:
    options = {"do_sample": True, "top_k": 20}
    sampled = generate(models, "mps", prompt, **options)
    assert sampled == generate(models, "cpu", prompt, **options)
    assert sampled != generate(models, "mps", prompt, do_sample=False)


def test_left_padded_batch(models: dict[str, Any], prompt: torch.Tensor) -> None:
    batch = torch.cat([prompt, prompt.flip(1)])
    mask = torch.ones_like(batch)
    mask[1, :13] = 0
    options = {"attention_mask": mask, "do_sample": False}
    assert generate(models, "mps", batch, **options) == generate(models, "cpu", batch, **options)


def test_gradients(models: dict[str, Any], prompt: torch.Tensor) -> None:
    norms = {}
    for device, model in models.items():
        tokens = prompt.to(device)
        model(tokens, labels=tokens).loss.backward()
        norms[device] = torch.stack([p.grad.norm().cpu() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(norms["mps"], norms["cpu"], rtol=1e-4, atol=1e-6)
    assert norms["cpu"].sum() > 0


def test_inductor_compiles_to_metal(models: dict[str, Any], prompt: torch.Tensor) -> None:
    torch._dynamo.reset()
    tokens = prompt.to("mps")
    # Inductor's `any` lets several threads write the same value without a barrier, which is a race.
    with torch.no_grad(), mps_simulator.settings(all_lanes=False, watch=False):
        compiled = torch.compile(models["mps"])(tokens).logits.cpu()
        torch.testing.assert_close(compiled, models["mps"](tokens).logits.cpu(), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
