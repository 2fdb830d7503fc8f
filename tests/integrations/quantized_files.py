"""Writes small models in each format of quantised weights, and makes float32 models with the same numbers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers import packed_models
from tests.helpers.packed_models import Format, quantise, stored

GROUP = 32
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
Tensors = dict[str, Tensor]


def mxfp4_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": group}}


def float_config(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def ct_config(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def gptq_config(**others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False} | others


def auto_round(packing: str) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "packing_format": f"auto_round:auto_{packing}"}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
FORMATS: dict[str, tuple[dict[str, Any], Format]] = {
    "mxfp4": (mxfp4_config(), Format("mxfp4")),
    "fp8": (FP8 | {"modules_to_not_convert": ["lm_head"]}, Format("fp8")),
    "float-channel": (float_config("channel"), Format("fp8 channel")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, Format("fp8 tensor")),
    "gptq": (gptq_config(sym=False), Format("gptq")),
    "gptq_v2": (
        gptq_config(bits=8, checkpoint_format="gptq_v2"),
        Format("gptq", bits=8, is_symmetric=True, is_second=True),
    ),
    "act-order": (gptq_config(desc_act=True), Format("gptq", is_symmetric=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, Format("awq")),
    "auto-round": (auto_round("gptq"), Format("auto-round")),
    "auto-round-awq": (auto_round("awq"), Format("auto-round", is_packed_as_awq=True)),
    "w4a16": (ct_config(4, symmetric=True), Format("compressed-tensors", is_symmetric=True)),
    "w8a16": (ct_config(8, symmetric=False), Format("compressed-tensors", bits=8)),
}


def written(w: Tensor, form: str) -> tuple[Tensors, Tensor]:
    """Returns a matrix's tensors in the file, and its numbers."""
    config, how = FORMATS[form]
    if not config.get("desc_act"):
        return packed_models.write(w, how)
    codes, order = quantise(w, how), torch.randperm(w.shape[1])  # each matrix has its own
    codes = replace(codes, codes=codes.codes[:, order], groups=codes.groups[order])
    return stored(codes, how), codes.numbers()


def is_protected(name: str, module: nn.Module) -> bool:
    """Returns whether published files leave it unpacked: heads, routers, and matrices whose rows do not fill a word."""
    return name == "lm_head" or module.weight.shape[0] % 8 != 0 or name.endswith("shared_expert_gate")


def in_float32(model: Any) -> Any:
    """Returns a copy. Its rotary frequencies are not rounded to bfloat16, as a random model's are."""
    twin = copy.deepcopy(model).float()
    if hasattr(twin.model, "rotary_emb"):
        twin.model.rotary_emb = type(twin.model.rotary_emb)(twin.config)
    return twin


def write(model: Any, folder: Path, form: str, is_protected: Any = is_protected) -> Any:
    """Writes the model's file, with one layer per expert. Returns the model with the file's numbers in float32."""
    twin = in_float32(model)
    state = {name: x.half() for name, x in model.state_dict().items()}
    for name, module in twin.named_modules():
        if type(module) is nn.Linear and not is_protected(name, module):
            tensors, module.weight.data = written(module.weight.data, form)
            del state[f"{name}.weight"]
            state |= {f"{name}.{ending}": x for ending, x in tensors.items()}
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for each, projections in PROJECTIONS.items():
                for e, matrix in enumerate(getattr(module, each).data):
                    for projection, rows in zip(projections, matrix.chunk(len(projections)), strict=True):
                        tensors, rows[:] = written(rows, form)
                        state |= {f"{name}.{e}.{projection}.{ending}": x for ending, x in tensors.items()}
                del state[f"{name}.{each}"]
    for name in state.keys() & twin.state_dict().keys():
        if state[name].dtype != torch.float8_e4m3fn:
            twin.state_dict()[name].copy_(state[name])
    save(model, folder, state, FORMATS[form][0])
    return twin


def write_mlx(model: Any, folder: Path, bits: int = 4, mode: str = "affine") -> Any:
    """Writes like `mlx_lm.convert`: stacked experts, other convolutions, norms plus one, 8-bit routers in 64s.

    mode: MLX's, "affine" or "mxfp4".
    """
    twin = in_float32(model)
    wrapped = model.config.model_type.startswith("qwen3_5")
    config: dict[str, Any] = {"group_size": GROUP, "bits": bits, "mode": mode}
    state: Tensors = {}

    def put(name: str, x: Tensor) -> Tensor:
        """Lets MLX quantise x, and returns the numbers."""
        own = {"group_size": 64, "bits": 8} if name.endswith(("mlp.gate", "shared_expert_gate")) else {}
        if own:
            config[f"language_model.{name}" if wrapped else name] = own
        options = {"group_size": GROUP, "bits": bits} | own
        if mode != "affine" and not own:
            words, scales = mx.quantize(mx.array(x.numpy()).astype(mx.float16), **options, mode=mode)
            state[f"{name}.weight"], state[f"{name}.scales"] = torch.from_dlpack(words), torch.from_dlpack(scales)
            numbers = mx.dequantize(words, scales, **options, mode=mode, dtype=mx.float32)
            return torch.from_dlpack(numbers)
        words, scales, biases = mx.quantize(mx.array(x.numpy()).astype(mx.float16), **options)
        for ending, tensor in {"weight": words, "scales": scales, "biases": biases}.items():
            state[f"{name}.{ending}"] = torch.from_dlpack(tensor)
        numbers = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), **options)
        return torch.from_dlpack(numbers)

    tied = twin.config.tie_word_embeddings
    for name, module in twin.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__.endswith("TopKRouter"):
            if not (tied and name == "lm_head"):
                module.weight.data = put(name, module.weight.data)
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for each, projections in PROJECTIONS.items():
                matrices = getattr(module, each).data
                for projection, rows in zip(projections, matrices.chunk(len(projections), dim=1), strict=True):
                    rows[:] = put(f"{name.removesuffix('experts')}switch_mlp.{projection}", rows)
        elif type(module).__name__.endswith("Conv1d"):
            module.weight.data = module.weight.data.half().float()
            state[f"{name}.weight"] = module.weight.data.half().mT
        else:
            for own, x in module.named_parameters(recurse=False):
                shift = float(type(module).__name__.endswith("RMSNorm"))
                x.data = (x.data + shift).half().float() - shift
                state[f"{name}.{own}"] = (x.data + shift).half()
    twin.tie_weights()
    state = {f"language_model.{name}" if wrapped else name: x for name, x in state.items()}
    save(model, folder, state, config)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization": config}))
    return twin


def save(model: Any, folder: Path, state: Tensors, config: dict[str, Any]) -> None:
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: x.contiguous() for name, x in state.items()}, folder / "model.safetensors", {"format": "pt"})
    saved = copy.deepcopy(model.config)
    saved.quantization_config = config
    saved.architectures, saved.dtype = [type(model).__name__], "float16"
    saved.save_pretrained(folder)
