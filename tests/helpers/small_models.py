"""Small models of each family for the engine's tests, and what transformers generates with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ROOT / "examples" / "pycode"  # Qwen3-Next without experts
TEXT = (TRAINED / "prompt.txt").read_bytes() * 8

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def config_of(family: str) -> Any:
    import transformers

    if family == "qwen3":
        return transformers.Qwen3Config(**COMMON, head_dim=64, tie_word_embeddings=True)
    if family == "exaone4":
        kinds = ["sliding_attention", "full_attention"] * 2
        return transformers.Exaone4Config(**COMMON, head_dim=64, sliding_window=40, layer_types=kinds)
    if family == "gemma3n":
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
        sizes = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256, "laurel_rank": 8}
        options = {"sliding_window": 40, "attention_bias": True, "activation_sparsity_pattern": [0.0] * 4}
        return transformers.Gemma3nTextConfig(**{**COMMON, **layers, **sizes, **options}, head_dim=64)
    if family == "qwen3_biased":
        return transformers.Qwen3Config(**COMMON, head_dim=64, tie_word_embeddings=True, attention_bias=True)
    if family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**COMMON, **LINEAR, head_dim=64, tie_word_embeddings=True)
    if family == "qwen3_next_moe":
        return transformers.Qwen3NextConfig(**COMMON, **LINEAR, **EXPERTS, head_dim=64)
    if family.startswith("qwen3_5_moe"):
        wider = {"moe_intermediate_size": 128} if family.endswith("_wide") else {}
        return transformers.Qwen3_5MoeTextConfig(**COMMON, **LINEAR, **(EXPERTS | wider), head_dim=64)
    if family == "qwen3_next_mtp":
        return transformers.Qwen3NextConfig(**COMMON, **LINEAR, **EXPERTS, head_dim=64, num_nextn_predict_layers=1)
    if family == "qwen3_5_mtp":
        return transformers.Qwen3_5TextConfig(**COMMON, **LINEAR, head_dim=64, mtp_num_hidden_layers=1)
    if family == "olmo_hybrid":
        return transformers.OlmoHybridConfig(
            **{**COMMON, "num_key_value_heads": 2}, **LINEAR, linear_allow_neg_eigval=True
        )
    raise ValueError(family)


def model_of(family: str, folder: Path) -> Path:
    """The folder of a model of the family: trained, or with random weights, made in `folder`."""
    if family == "qwen3_next":
        return TRAINED
    import transformers

    path = folder / family
    if not path.exists():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(family))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:  # larger than the default: tokens that differ, and far apart
                torch.nn.init.normal_(parameter, std=0.1)
        if family.endswith("_mtp"):
            torch.nn.init.normal_(model.get_input_embeddings().weight)
        if family in ("qwen3_biased", "gemma3n"):
            bias_keys(model)
        model.save_pretrained(path)
        if family.endswith("_mtp"):
            add_token_predictor(path)
        if family == "olmo_hybrid":
            rewrite_as_released(path)
    return path


def bias_keys(model: torch.nn.Module) -> None:
    """Makes the means of some channels of keys large, and scores far apart. The rotary embedding turns these channels
    slowly, so that the keys of a tile share them."""
    is_slow = torch.arange(64) % 32 >= 20
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.data = torch.where(is_slow, 6 * torch.randn(64), 0.0)
        if name.endswith("q_norm.weight"):
            parameter.data.fill_(8)


def add_token_predictor(path: Path) -> None:
    """Weights of a multi-token prediction layer, which transformers does not have: those of a layer of the model.

    The model's next token follows mostly from the last one's embedding, which is much larger than what the layers add;
    the predictor sees the same embedding, so that some of its tokens are the model's and some are not.
    """
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = load_file(file)
    size, layer = COMMON["hidden_size"], "model.layers.1."
    predictor = {name.replace(layer, "layers.0."): weights[name] for name in weights if name.startswith(layer)}
    predictor["fc.weight"] = torch.cat([torch.eye(size), 0.1 * torch.randn(size, size)], dim=1)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        predictor[f"{name}.weight"] = torch.zeros(size)
    copies = {f"mtp.{name}": tensor.clone() for name, tensor in predictor.items()}
    save_file({**weights, **copies}, file, metadata={"format": "pt"})


def rewrite_as_released(path: Path) -> None:
    """transformers 5.19 saves norms by names that vLLM does not take, and cuts the fused convolution in equal parts."""
    from safetensors.torch import load_file, save_file

    names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    file = path / "model.safetensors"
    weights = load_file(file)
    for old, new in names.items():
        weights = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in weights.items()}
    keys = LINEAR["linear_num_key_heads"] * LINEAR["linear_key_head_dim"]
    values = LINEAR["linear_num_value_heads"] * LINEAR["linear_value_head_dim"]
    for name in [name for name in weights if name.endswith(".q_conv1d.weight")]:
        parts = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        fused = torch.cat([weights[part] for part in parts])
        for part, rows in zip(parts, fused.split([keys, keys, values]), strict=True):
            weights[part] = rows.contiguous()
    save_file(weights, file, metadata={"format": "pt"})


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj")


def adapter_of(path: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """A LoRA adapter with random weights, and the model with the adapter's products added to its weights."""
    from safetensors.torch import load_file, save_file

    rank, alpha = 4, 8
    generator = torch.Generator().manual_seed(seed)
    weights, adapter = load_file(path / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        module = name.removesuffix(".weight")
        if module.rsplit(".")[-1] not in ADAPTED:
            continue
        a = 0.05 * torch.randn(rank, weight.shape[1], generator=generator)
        b = 0.05 * torch.randn(weight.shape[0], rank, generator=generator)
        adapter[f"base_model.model.{module}.lora_A.weight"] = a
        adapter[f"base_model.model.{module}.lora_B.weight"] = b
        weights[name] = weight.float() + alpha / rank * b @ a
    merged, own = folder / f"merged_{seed}", folder / f"adapter_{seed}"
    shutil.copytree(path, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    own.mkdir()
    save_file(adapter, own / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": list(ADAPTED), "peft_type": "LORA"}
    (own / "adapter_config.json").write_text(json.dumps(settings))
    return own, merged


def with_tokenizer(model: Path, folder: Path) -> Path:
    """The model and a tokenizer whose tokens are bytes, which its weights were trained on."""
    target = folder / "with_tokenizer"
    shutil.copytree(model, target)
    tokenizer_into(target)
    return target


def tokenizer_into(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = bytes_to_characters()
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def bytes_to_characters() -> list[str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def prompts(count: int, longest: int) -> list[list[int]]:
    """Returns prompts of 1 to `longest` tokens, cut from a text at different places. The first is the shortest."""
    lengths = [1, longest, *((i * 37) % longest + 1 for i in range(2, count))]
    return [list(TEXT[(i * 97) % 700 :][:length]) for i, length in enumerate(lengths[:count])]


def generated(path: Path, texts: list[list[int]], tokens: int, dtype: str = "float32") -> tuple[list[Any], list[Any]]:
    """Runs transformers' generate() for each prompt. Returns greedy tokens, and each one's lead over the next best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    all_tokens, all_margins = [], []
    for text in texts:
        ids = torch.tensor([text])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(out.logits)[:, 0].float().topk(2).values
        all_tokens.append(out.sequences[0, len(text) :].tolist())
        all_margins.append((best[:, 0] - best[:, 1]).tolist())
    return all_tokens, all_margins
