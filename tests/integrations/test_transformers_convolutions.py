"""Tests models of other rules: enable() takes their short convolutions and Kimi Delta Attention, and nothing else."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.models import random_tokens, torch_gdn_enabled
from torch_gdn.integrations.transformers.patches import (
    CONVOLVING_MODELS,
    KDA_IN_THE_MODULE,
    KDA_MODELS,
    modeling_module,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the model, and the special options of its configuration
    "bailing_hybrid": (
        "BailingHybrid",
        LATENT | {"n_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", MAMBA | {"mamba_d_ssm": 128, "head_dim": 16}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "num_local_experts": 2},
    ),
    "inkling": ("Inkling", {}),
    "inkling2": ("Inkling2", {}),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}),
    "kimi_linear": (
        "KimiLinear",
        LATENT | {"linear_num_heads": 2, "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2Moe", TWO_EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 32}),
    "nemotron_h": (
        "NemotronH",
        {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "head_dim": 16}
        | {"layers_block_type": ["mamba", "attention"]},
    ),
    "zamba": ("Zamba", ZAMBA | {"n_mamba_heads": 2, "attention_head_dim": 32, "mamba_dt_rank": 8}),
    "zamba2": ("Zamba2", ZAMBA | {"n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1}),
}
BLOCKS = {"kimi_linear": "KimiLinearMoE.forward", "bailing_hybrid": "BailingHybridMoE.forward"}  # blocks with groups
UNTRIED = {"glm5_next"}  # it is one part of a model of images


def random_model(kind: str, **sizes: Any) -> Any:
    name, special = KINDS[kind]
    package, module = importlib.import_module(f"transformers.models.{kind}"), modeling_module(kind)
    configuration = getattr(package, f"{name}{'TextConfig' if kind.startswith('inkling') else 'Config'}")
    torch.manual_seed(0)
    return getattr(module, f"{name}ForCausalLM")(configuration(**{**SIZES, **special, **sizes})).eval()


def logits(model: Any) -> Tensor:
    """Returns the logits of a prompt's next token, and of three more."""
    tokens = random_tokens(2, 17)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    return torch.stack(model.generate(tokens, max_new_tokens=4, **options).logits)


def test_every_model_is_tried() -> None:
    assert set(KINDS) | UNTRIED == {*CONVOLVING_MODELS, *KDA_MODELS}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_fallback(kind: str) -> None:
    if modeling_module(kind) is None:
        pytest.skip(f"this transformers has no {kind}")
    model = random_model(kind)
    expected = logits(model)
    with torch_gdn_enabled() as transformers:
        found, status = logits(model), transformers.status()
    assert expected.std() > 0.01
    assert ((found - expected).norm() / expected.norm()).item() < 2e-6
    rule = KDA_IN_THE_MODULE if kind in KDA_MODELS else {}
    assert set(status.taken) == {"causal_conv1d_fn", "causal_conv1d_update", *rule.values()} and not status.left
    assert status.taken["causal_conv1d_update"] == 3 * status.taken["causal_conv1d_fn"]
    functions = {name for name in status.replaced[kind] if not name.endswith(("RMSNorm.forward", "MLP.forward"))}
    blocks = {BLOCKS[kind]} if kind in BLOCKS else set()
    assert functions == {"causal_conv1d_fn", "causal_conv1d_update", *rule, *blocks}
