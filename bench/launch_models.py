"""Small models with the layers of published ones, whose launches `launches` and `compiled` count."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from torch_gdn.tools import fits

TOTAL = "launches in all"
PROMPT = 8  # tokens
KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
SMALL = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 1024}
NEVER = SMALL["vocab_size"]  # ends a sequence; a step includes the check for it, but no step is the last
SMALL_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
# The names are `fits`'s. Each model has the same configuration with other sizes.
SMALLEST = {"num_hidden_layers": 24, "linear_num_value_heads": 16, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-35B-A3B": ("Qwen3.5-35B-A3B", {}),
    "Qwen3-Next-80B-A3B": ("Qwen3-Next-80B-A3B", {}),
    "Qwen3.5-0.8B": ("Qwen3.5-9B", SMALLEST),
    "OLMo-Hybrid-7B": ("OLMo-Hybrid-7B", {}),
}


def configuration(name: str) -> Any:
    """Returns the published model's configuration."""
    known, other = MODELS[name]
    return type(fits.configuration_of(known))(**other)


def small_model(name: str, dtype: torch.dtype, kinds: Sequence[str] = KINDS) -> Any:
    published = configuration(name)
    sizes = {**SMALL, **(SMALL_EXPERTS if hasattr(published, "num_experts") else {})}
    kept = {key: value for key, value in published.to_diff_dict().items() if key not in sizes}
    if getattr(published, "head_dim", None) is None:
        kept["head_dim"] = published.hidden_size // published.num_attention_heads
    few = {"num_hidden_layers": len(kinds), "layer_types": list(kinds), "pad_token_id": 0, "eos_token_id": NEVER}
    small = type(published)(**{**kept, **sizes, **few})
    torch.manual_seed(0)
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    return auto.from_config(small, dtype=dtype).eval()
