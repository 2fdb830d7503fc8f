"""Small models in files of each format of quantised weights, and the same numbers in a model of float32."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torch_gdn.quantized import pack

GROUP = 32
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # place p of a word holds row AWQ_PLACES[p] of eight
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Codes:
    """A matrix in codes: w = scales * (codes - zeros), with those of a column's group."""

    codes: Tensor  # [N, K]
    scales: Tensor  # [N, K / GROUP], of half precision
    zeros: Tensor
    groups: Tensor  # [K]

    @property
    def numbers(self) -> Tensor:
        return self.scales.float()[:, self.groups] * (self.codes - self.zeros[:, self.groups])

    def reordered(self) -> Codes:
        """Returns the same columns in another order, as act-order leaves them."""
        order = torch.randperm(len(self.groups))
        return Codes(self.codes[:, order], self.scales, self.zeros, self.groups[order])


def quantize(w: Tensor, bits: int, symmetric: bool) -> Codes:
    half, highest = 2 ** (bits - 1), 2**bits - 1
    groups = w.float().unflatten(1, (-1, GROUP))
    if symmetric:
        scales = (groups.abs().amax(-1) / (half - 1)).half()
        zeros = torch.full(scales.shape, half)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / highest).half()
        zeros = (-low / scales.float()).round().int().clamp(1, highest)  # GPTQ's "less one" cannot express 0
    codes = (groups / scales.float()[..., None]).round().int() + zeros[..., None]
    return Codes(codes.clamp(0, highest).flatten(1).int(), scales, zeros.int(), torch.arange(w.shape[1]) // GROUP)


def gptq(w: Codes, bits: int, offset: int = 1) -> Tensors:
    return {
        "qweight": pack(w.codes, bits).T,
        "qzeros": pack(w.zeros.T - offset, bits),
        "scales": w.scales.T,
        "g_idx": w.groups.int(),
    }


def awq(w: Codes, bits: int) -> Tensors:
    def interleaved(x: Tensor) -> Tensor:
        return pack(x.unflatten(-1, (-1, 8))[..., AWQ_PLACES].flatten(-2), 4)

    return {"qweight": interleaved(w.codes.T), "qzeros": interleaved(w.zeros.T), "scales": w.scales.T}


def compressed_tensors(w: Codes, bits: int) -> Tensors:
    """Symmetric ones have no zero points."""
    shape = torch.tensor(w.codes.shape)
    found = {"weight_packed": pack(w.codes, bits), "weight_scale": w.scales, "weight_shape": shape}
    half = 2 ** (bits - 1)
    if bool((w.zeros == half).all()):
        return found
    per_word = 32 // bits
    rows = -(-len(w.zeros) // per_word) * per_word
    zeros = nn.functional.pad(w.zeros, (0, 0, 0, rows - len(w.zeros)))
    return found | {"weight_zero_point": pack(zeros.T, bits).T}


@dataclass(frozen=True)
class Written:
    """A format, its configuration, and how a matrix is written."""

    config: dict[str, Any]
    tensors: Callable[[Codes, int], Tensors]
    bits: int = 4
    symmetric: bool = True
    act_order: bool = False

    def matrix(self, w: Tensor) -> tuple[Tensors, Tensor]:
        codes = quantize(w, self.bits, self.symmetric)
        codes = codes.reordered() if self.act_order else codes
        return self.tensors(codes, self.bits), codes.numbers


def ct_config(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def gptq_config(**others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False} | others


FORMATS = {
    "gptq": Written(gptq_config(sym=False), gptq, symmetric=False),
    "gptq_v2": Written(gptq_config(bits=8, checkpoint_format="gptq_v2"), lambda w, bits: gptq(w, bits, 0), bits=8),
    "act-order": Written(gptq_config(desc_act=True), gptq, act_order=True),
    "awq": Written({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, symmetric=False),
    "auto-round": Written(
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, gptq, symmetric=False
    ),
    "auto-round-awq": Written(
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, awq, symmetric=False
    ),
    "w4a16": Written(ct_config(4, symmetric=True), compressed_tensors),
    "w8a16": Written(ct_config(8, symmetric=False), compressed_tensors, bits=8, symmetric=False),
}


def is_protected(name: str, module: nn.Module) -> bool:
    """Returns whether published files do not pack it: heads, routers, and matrices whose rows do not fill a word."""
    return name == "lm_head" or module.weight.shape[0] % 8 != 0 or name.endswith("shared_expert_gate")


def in_float32(model: Any) -> Any:
    """A copy, whose rotary frequencies are not rounded to bfloat16 as those of a random model are."""
    twin = copy.deepcopy(model).float()
    if hasattr(twin.model, "rotary_emb"):
        twin.model.rotary_emb = type(twin.model.rotary_emb)(twin.config)
    return twin


def write(model: Any, folder: Path, form: str, is_protected: Any = is_protected) -> Any:
    """The model's file in this format, an expert a layer; and the model with the file's numbers in float32."""
    written, twin = FORMATS[form], in_float32(model)
    state = {name: x.half() for name, x in model.state_dict().items()}
    for name, module in twin.named_modules():
        if type(module) is nn.Linear and not is_protected(name, module):
            tensors, module.weight.data = written.matrix(module.weight.data)
            state |= {f"{name}.{ending}": x for ending, x in tensors.items()}
            del state[f"{name}.weight"]
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for each, projections in PROJECTIONS.items():
                for e, matrix in enumerate(getattr(module, each).data):
                    for projection, rows in zip(projections, matrix.chunk(len(projections)), strict=True):
                        tensors, rows[:] = written.matrix(rows)
                        state |= {f"{name}.{e}.{projection}.{ending}": x for ending, x in tensors.items()}
                del state[f"{name}.{each}"]
    for name in state.keys() & twin.state_dict().keys():
        twin.state_dict()[name].copy_(state[name])
    save(model, folder, state, written.config)
    return twin


def write_mlx(model: Any, folder: Path, bits: int = 4) -> Any:
    """Writes as `mlx_lm.convert` does: stacked experts, other convolutions, norms plus one, 8-bit routers in 64s."""
    twin = in_float32(model)
    wrapped = model.config.model_type.startswith("qwen3_5")
    config: dict[str, Any] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    state: Tensors = {}

    def put(name: str, x: Tensor) -> Tensor:
        """Quantised by MLX; the numbers of it."""
        own = {"group_size": 64, "bits": 8} if name.endswith(("mlp.gate", "shared_expert_gate")) else {}
        if own:
            config[f"language_model.{name}" if wrapped else name] = own
        options = {"group_size": GROUP, "bits": bits} | own
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
