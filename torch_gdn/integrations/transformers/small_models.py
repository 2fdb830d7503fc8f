"""Knows a small configuration of each model whose classes torch_gdn replaces."""

import importlib
from typing import Any

import torch

VOCABULARY = 64
ALL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
SIZES = ALL_SIZES | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# Each token uses every expert. These tests do not depend on the choice, which ties would decide.
TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = TWO_EXPERTS | {"shared_expert_intermediate_size": 32}
# Attention of Qwen4-Exp chooses blocks of keys. Here it chooses all of them.
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
}
Table = dict[str, tuple[str, dict[str, Any]]]
DELTA_NETS: Table = {  # the beginning of the classes' names, and the special options of the configuration
    "qwen3_next": ("Qwen3Next", EXPERTS),
    "qwen3_5": ("Qwen3_5", {}),
    "qwen3_5_moe": ("Qwen3_5Moe", EXPERTS),
    "qwen4_exp": ("Qwen4Exp", EXPERTS | INDEXER),
    "lara_mini": (
        "LaraMini",
        EXPERTS
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
        | {"sliding_window": 8},
    ),
    # Like OLMo-Hybrid 7B, it has as many key heads as value heads, and values twice as long as keys.
    "olmo_hybrid": (
        "OlmoHybrid",
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
        | {"linear_key_head_dim": 24, "linear_value_head_dim": 48},
    ),
}
OTHER_SIZES = ALL_SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
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
INKLING = {
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": VOCABULARY,
}
IMAGES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
OTHERS: Table = {
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
    "inkling": ("Inkling", INKLING),
    "inkling2": ("Inkling2", INKLING),
    "inkling2_loop": (
        "Inkling2Loop",
        INKLING
        | {"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
        | {"loop_num_passes": 2, "loop_gate_rank": 8, "n_layers_per_attn_res_block": 1},
    ),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}),
    "kimi_linear": (
        "KimiLinear",
        LATENT | {"linear_num_heads": 2, "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    # A model of text and images, whose text has a configuration of its own.
    "glm5_next": (
        "Glm5Next",
        {name: size for name, size in LATENT.items() if name not in ("qk_rope_head_dim", "num_local_experts")}
        | {"q_lora_rank": 16, "linear_num_heads": 2, "linear_head_dim": 32, "n_routed_experts": 2, "hc_mult": 2}
        | {"index_topk": 512, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 2}
        | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2Moe", TWO_EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "full_attention"], "head_dim": 16}),
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


def make(kind: str, seed: int = 0, **special: Any) -> Any:
    """Makes a model with random weights, and leaves the caller's random numbers as they are.

    `special`: options of its configuration.
    """
    package = importlib.import_module(f"transformers.models.{kind}")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    prefix, own = (DELTA_NETS | OTHERS)[kind]
    options = {**(SIZES if kind in DELTA_NETS else OTHER_SIZES), **own, **special}
    name, configuration = f"{prefix}ForCausalLM", getattr(package, f"{prefix}TextConfig", None)
    if kind == "glm5_next":
        name, configuration = "Glm5NextForConditionalGeneration", None
        options = {"text_config": options, "vision_config": IMAGES}
    configuration = configuration or getattr(package, f"{prefix}Config")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change those on mps too
        return getattr(module, name)(configuration(**options)).eval()
