"""Writes checkpoints with the widths of published models and few layers. Packed tensors are random words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUP = 128
COMMON = {"vocab_size": 1024, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
COMMON |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "linear_num_value_heads": 32},  # Qwen3.5-9B
    "qwen3_5_moe": {"hidden_size": 2048, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 16}
    | {"shared_expert_intermediate_size": 512, "num_key_value_heads": 2, "linear_num_value_heads": 32},  # 35B-A3B
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8, fused": {"quant_method": "fp8", "weight_block_size": [128, 128]},  # a layer's experts are one tensor
    "mlx": {"bits": 4, "group_size": GROUP},
}


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape).half() / 64


def packed(form: str, *sizes: int) -> dict[str, Tensor]:
    *E, N, K = sizes
    if form == "mlx":
        parts = {name: scales(*E, N, K // GROUP) for name in ("scales", "biases")}
        return {"weight": words(*E, N, K // 8).view(torch.uint32), **parts}
    if form.startswith("fp8"):
        weight = torch.randint(0, 0x7E, sizes).byte().view(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale_inv": torch.rand(*E, -(-N // 128), -(-K // 128)) / 4096}
    weight = words(K // 8, N) if form == "gptq" else words(K, N // 8)
    return {"qweight": weight, "qzeros": words(K // GROUP, N // 8), "scales": scales(K // GROUP, N)}


def tensors_of(form: str, name: str, shape: torch.Size) -> dict[str, Tensor]:
    """Returns what a file holds for a parameter of transformers' model."""
    module = name.removesuffix(".weight")
    if ".experts." in name:
        stem, _, which = name.rpartition(".experts.")
        if form == "fp8, fused":
            return {f"{name}{ending.removeprefix('weight')}": x for ending, x in packed(form, *shape).items()}
        E, N, K = shape
        parts = {"gate_proj": N // 2, "up_proj": N // 2} if which == "gate_up_proj" else {"down_proj": N}
        if form == "mlx":
            result = {f"{stem}.switch_mlp.{part}": packed(form, E, rows, K) for part, rows in parts.items()}
        else:
            result = {f"{stem}.experts.{e}.{part}": packed(form, n, K) for e in range(E) for part, n in parts.items()}
        return {f"{each}.{ending}": x for each, entries in result.items() for ending, x in entries.items()}
    if len(shape) != 2 or shape[0] % 128 or "embed" in name or name.endswith((".gate.weight", "lm_head.weight")):
        return {name: torch.zeros(shape, dtype=torch.bfloat16)}
    return {f"{module}.{ending}": x for ending, x in packed(form, *shape).items()}


def write_wide_model(folder: Path, kind: str, form: str, layers: int) -> int:
    """Writes the checkpoint, and returns the bytes of its tensors."""
    import transformers
    from safetensors.torch import save_file

    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    types = ["linear_attention", "full_attention"] * layers
    sizes = {**COMMON, **SIZES[kind], "num_hidden_layers": layers, "layer_types": types[:layers]}
    config = getattr(transformers, f"{name}TextConfig")(**sizes)
    config.architectures, config.dtype = [f"{name}ForCausalLM"], "bfloat16"
    config.quantization_config = CONFIGURATIONS[form]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    stored: dict[str, Tensor] = {}
    for parameter, x in model.state_dict().items():
        stored |= tensors_of(form, parameter, x.shape)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    more = {"quantization_config": CONFIGURATIONS[form], "full_attention_interval": 2}  # as released files have it
    (folder / "config.json").write_text(json.dumps(content | more))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return sum(x.nbytes for x in stored.values())


def save_experts(model: torch.nn.Module, file: str) -> None:
    """Saves an engine's parameters of the first layer's experts."""
    from safetensors.torch import save_file

    parameters = model.named_parameters()
    found = {name: x.data.cpu() for name, x in parameters if "layers.0." in name and ".experts." in name}
    save_file({name.rpartition(".")[2]: x for name, x in found.items()}, file)


def assert_little_is_held(stored: int, held: int, most: int, numbers: int, spare: float = 0.01) -> None:
    """Compares what `measured` gives with the bytes of the file."""
    assert 0.99 <= held / stored <= 1 + spare
    assert most / stored <= 1.15
    assert numbers == 0


def assert_loading_takes_little(script: Path, form: str, folder: Path, environment: dict[str, str]) -> None:
    """Has an engine's script load experts of published widths, in a process without an engine."""
    path, experts = folder / "wide", folder / "experts.safetensors"
    stored = write_wide_model(path, "qwen3_5_moe", form, layers=4)
    command = [sys.executable, str(script), str(path), str(experts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_little_is_held(stored, *json.loads(done.stdout.splitlines()[-1]), spare=0.05)  # tables of angles too
    if form == "fp8, fused":
        assert_experts_are_those_of_the_file(path, experts)


def assert_experts_are_those_of_the_file(folder: Path, loaded: Path) -> None:
    """Compares an engine's parameters of the first layer's experts with the file's tensors of all experts."""
    from safetensors.torch import load_file

    tensors, parameters = load_file(folder / "model.safetensors"), load_file(loaded)
    for own, name in {"w13": "gate_up_proj", "w2": "down_proj"}.items():
        stem = f"model.layers.0.mlp.experts.{name}"
        assert torch.equal(parameters[f"{own}_weight"], tensors[stem].view(torch.uint8))
        assert torch.equal(parameters[f"{own}_scales"], tensors[f"{stem}_scale_inv"])
