"""Measures the tokens per second of a small model with and without torch_gdn."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_gdn._timing import wait
from torch_gdn.tools import expect
from torch_gdn_check.steps import Outcome, Skipped, refuse_simulated

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}


def small_model(device: torch.device) -> Any:
    """Returns Qwen3-Next's layers, three of them Gated DeltaNet, with random weights in bfloat16."""
    try:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    except ImportError as error:
        raise Skipped(f"no model to run: {error}; pip install 'transformers>=5.23,<5.25'") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG)).to(torch.bfloat16).to(device).eval()


def tokens_per_second(model: Any, device: torch.device, prompt: int, new: int) -> dict[str, float]:
    """Times a prompt and the greedy decoding after it. A first round compiles."""
    from torch_gdn.integrations.transformers import versions

    tokens = torch.arange(prompt, device=device)[None] % CONFIG["vocab_size"]
    result = {}
    for _ in range(2):
        wait(device)
        start = time.perf_counter()
        output = model(input_ids=tokens, use_cache=True)
        wait(device)
        prefilled = time.perf_counter()
        for _ in range(new):
            following = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=following, use_cache=True, **versions.with_cache(versions.cache_in(output)))
        wait(device)
        decoded = time.perf_counter()
        result = {"prefill": prompt / (prefilled - start), "decode": new / (decoded - prefilled)}
    return result


@torch.no_grad()
def check_model(device: torch.device, prompt: int = 512, new: int = 32) -> Outcome:
    refuse_simulated(device)
    model = small_model(device)
    from torch_gdn.integrations import transformers as integration

    figures = {"transformers": tokens_per_second(model, device, prompt, new)}
    integration.enable()
    try:
        figures["torch_gdn"] = tokens_per_second(model, device, prompt, new)
    finally:
        integration.disable()
    work = expect.work_of(model.config)
    least = {"moved": work.moved("bf16", prompt + new), "launches": work.launches}  # of a decoded token
    return Outcome({"tokens_per_second": figures, "prompt": prompt, "new": new, **least})
