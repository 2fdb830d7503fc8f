"""Small models in the published layouts of quantised weights, and the same weights as numbers.

The writers are independent of `torch_gdn.quantized`; words of compressed-tensors are packed by its own package.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.small_models import EXPERTS

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of a word, lowest bits first
PLAIN = r"embed_tokens|lm_head|\.gate$|shared_expert_gate|in_proj_(b|a|ba)$|conv1d"  # modules that are left as they are


@dataclass(frozen=True)
class Format:
    layout: str  # gptq, awq, compressed-tensors, auto-round, mlx, mxfp4, "mlx mxfp4", fp8, or "fp8 " and a strategy
    bits: int = 4
    group: int | None = 32  # None: a row
    is_symmetric: bool = False
    is_ordered: bool = False  # the groups of columns are shuffled, by GPTQ's desc_act or llm-compressor's actorder
    plain: str = PLAIN
    eight: str | None = None  # modules that MLX's file has in 8 bits
    is_second: bool = False  # GPTQ's format gptq_v2, whose zero points are stored as they are
    is_packed_as_awq: bool = False  # of AutoRound
    wrapped: bool = False  # the text part of a model that sees: other names, a vision part, and lists by those names

    @property
    def per_word(self) -> int:
        return 32 // self.bits


@dataclass(frozen=True)
class Codes:
    """weight[n, k] = scales[n, group of k] * (codes[n, k] - zeros[n, group of k])"""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def numbers(self) -> Tensor:
        return self.scales.float()[:, self.groups] * (self.codes - self.zeros[:, self.groups])


def quantise(weight: Tensor, how: Format) -> Codes:
    columns = weight.shape[1]
    group = how.group or columns
    groups = torch.arange(columns) // group
    if how.is_ordered:  # the same for all matrices of a fused layer
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    largest, halves = 2**how.bits - 1, 2 ** (how.bits - 1)
    by_group = weight.float()[:, groups.argsort(stable=True)].unflatten(1, (-1, group))
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if how.is_symmetric:
        scales = torch.maximum(-low / halves, high / (halves - 1)).half()
        zeros = torch.full(scales.shape, halves)
    else:
        scales = ((high - low) / largest).half()
        zeros = (-low / scales.float()).round().clamp(1, largest).long()
    codes = (weight.float() / scales.float()[:, groups]).round() + zeros[:, groups]
    return Codes(codes.clamp(0, largest).long(), zeros, scales, groups)


BLOCK = 128


def float8(
    weight: Tensor, scale: str = "weight_scale_inv", strategy: str = "block"
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a matrix's tensors in files of FP8, whose scales have this name, and its numbers in float32.

    strategy: what a scale belongs to: a "block" of 128 x 128, a "channel", which is a row, or the whole "tensor".
    """
    N, K = weight.shape
    rows, columns = {"block": (BLOCK, BLOCK), "channel": (1, K), "tensor": (N, K)}[strategy]
    row_of, column_of = torch.arange(N) // rows, torch.arange(K) // columns
    largest = torch.zeros(-(-N // rows), -(-K // columns))
    for n in range(len(largest)):
        for k in range(largest.shape[1]):
            largest[n, k] = weight[n * rows : (n + 1) * rows, k * columns : (k + 1) * columns].abs().max()
    scales = largest.clamp(min=1e-6) / 448
    spread = scales[row_of][:, column_of]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    written = scales.reshape(()) if strategy == "tensor" else scales
    return {"weight": codes, scale: written}, codes.float() * spread


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weight: Tensor, is_mlx: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a matrix's tensors in files of MXFP4, by compressed-tensors or MLX, and its numbers in float32."""
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1).log2().ceil() - 2).clamp(min=-120)  # the largest number is 6
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    signed = (codes + 8 * (scaled < 0)).flatten(1)
    scales = (exponents + 127).byte()
    if is_mlx:
        return {"weight": words(signed, 4).view(torch.uint32), "scales": scales}, numbers.flatten(1)
    packed = (signed[:, ::2] | signed[:, 1::2] << 4).byte()
    return {"weight_packed": packed, "weight_scale": scales}, numbers.flatten(1)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packed along the last dimension, lowest bits first."""
    per_word = 32 // bits
    parts = codes.unflatten(-1, (-1, per_word))[..., list(order or range(per_word))]
    total = (parts << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def stored(of: Codes, how: Format) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    if how.layout == "awq" or how.is_packed_as_awq:
        qweight, qzeros = (words(each.T, how.bits, AWQ_ORDER) for each in (of.codes, of.zeros))
        return {"qweight": qweight, "qzeros": qzeros, "scales": of.scales.T}
    if how.layout in ("gptq", "auto-round"):
        ordered = {"g_idx": of.groups.int()} if how.layout == "gptq" else {}
        qweight, qzeros = words(of.codes, how.bits).T, words(of.zeros.T - int(not how.is_second), how.bits)
        return {"qweight": qweight, "qzeros": qzeros, "scales": of.scales.T, **ordered}
    if how.layout == "mlx":
        weight = words(of.codes, how.bits).view(torch.uint32)
        return {"weight": weight, "scales": of.scales.float(), "biases": -of.scales.float() * of.zeros}
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    middle = 2 ** (how.bits - 1)
    tensors = {
        "weight_packed": pack_to_int32((of.codes - middle).to(torch.int8), how.bits),
        "weight_scale": of.scales,
        "weight_shape": torch.tensor(of.codes.shape),
    }
    if not how.is_symmetric:
        tensors["weight_zero_point"] = pack_to_int32((of.zeros - middle).to(torch.int8), how.bits, packed_dim=0)
    if how.is_ordered:
        tensors["weight_g_idx"] = of.groups.int()
    return tensors


def compressed_tensors(of: Codes, how: Format) -> dict[str, Tensor]:
    """Returns the tensors that `stored` has its package pack."""
    tensors = {"weight_packed": words(of.codes, how.bits), "weight_scale": of.scales}
    tensors["weight_shape"] = torch.tensor(of.codes.shape)
    if not how.is_symmetric:
        zeros = torch.nn.functional.pad(of.zeros, (0, 0, 0, -len(of.zeros) % how.per_word))
        tensors["weight_zero_point"] = words(zeros.T, how.bits).T
    return tensors | ({"weight_g_idx": of.groups.int()} if how.is_ordered else {})


def write(weight: Tensor, how: Format) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a matrix's tensors in the files, made without any format's package, and its numbers in float32."""
    if how.layout.startswith("fp8"):
        _, _, strategy = how.layout.partition(" ")
        return float8(weight, "weight_scale" if strategy else "weight_scale_inv", strategy or "block")
    if how.layout.endswith("mxfp4"):
        return mxfp4(weight, is_mlx=how.layout.startswith("mlx"))
    codes = quantise(weight, how)
    return (compressed_tensors if how.layout == "compressed-tensors" else stored)(codes, how), codes.numbers()


def configuration(how: Format, plain: list[str]) -> dict[str, Any]:
    """config.json's quantization_config; plain: names of the modules that are not quantised."""
    settings: dict[str, Any] = {"bits": how.bits, "group_size": how.group}
    if how.layout == "fp8":
        settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        settings |= {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": plain}
    elif how.layout == "gptq":
        settings |= {"quant_method": "gptq", "sym": how.is_symmetric, "desc_act": how.is_ordered}
        settings |= {"checkpoint_format": "gptq_v2" if how.is_second else "gptq"}
        settings |= {"dynamic": {f"-:{re.escape(name)}$": {} for name in plain}}
    elif how.layout == "awq":
        settings |= {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    elif how.layout == "auto-round":
        extra = {name: {"bits": 16, "data_type": "float"} for name in plain}
        packing = f"auto_round:auto_{'awq' if how.is_packed_as_awq else 'gptq'}"
        settings |= {"quant_method": "auto-round", "packing_format": packing, "sym": how.is_symmetric}
        settings |= {"extra_config": extra}
    elif how.layout == "compressed-tensors":
        weights = {"num_bits": how.bits, "type": "int", "symmetric": how.is_symmetric}
        weights |= {"strategy": "group" if how.group else "channel", "group_size": how.group}
        group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
        settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": plain}
        settings |= {"config_groups": {"group_0": group}, "quantization_status": "compressed"}
    return settings


def as_mlx(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as mlx-lm stores them: experts in one tensor; in hybrids other convolutions, norms plus one."""
    is_hybrid = any(name.endswith(".conv1d.weight") for name in stored)
    changed: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in stored.items():
        if ".experts." in name:
            stem, number, part = re.split(r"\.experts\.(\d+)\.", name)
            stacks.setdefault(f"{stem}.switch_mlp.{part}", [tensor] * EXPERTS["num_experts"])[int(number)] = tensor
        elif name.endswith(".conv1d.weight"):
            changed[name] = tensor.mT.contiguous()
        elif is_hybrid and name.endswith("norm.weight") and "linear_attn" not in name:
            changed[name] = tensor + 1
        else:
            changed[name] = tensor
    return changed | {name: torch.stack(tensors) for name, tensors in stacks.items()}


def wrap(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model that sees, around that of its text part."""
    import transformers

    kind = config["model_type"].removesuffix("_text")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": config["hidden_size"], "num_position_embeddings": 16}
    text = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    whole = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision).to_dict()
    tied = config["tie_word_embeddings"]
    return whole | {"architectures": [f"{name}ForConditionalGeneration"], "tie_word_embeddings": tied}


def wrapped_name(name: str, how: Format) -> str:
    """The name of a text model's tensor or module in the file of a model that sees."""
    if how.layout == "mlx":
        return f"language_model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)


def vision_part(config: dict[str, Any], how: Format) -> dict[str, Tensor]:
    import transformers

    kind = "Qwen3_5MoeVisionModel" if "moe" in config["model_type"] else "Qwen3_5VisionModel"
    whole = getattr(transformers, config["architectures"][0]).config_class(**config)
    model = getattr(transformers, kind)._from_config(whole.vision_config)
    prefix = "vision_tower" if how.layout == "mlx" else "model.visual"
    return {f"{prefix}.{name}": tensor.float() for name, tensor in model.state_dict().items()}


def packed_model(model: Path, how: Format, folder: Path) -> tuple[Path, Path]:
    """The folder of the model in the layout, and of a model with the same weights in float32."""
    from safetensors.torch import load_file, save_file

    packed, numbers = folder / "packed", folder / "numbers"
    plain, wide, packed_tensors, plain_tensors = [], {}, {}, {}
    named = functools.partial(wrapped_name, how=how) if how.wrapped else str
    for name, weight in load_file(model / "model.safetensors").items():
        module, is_weight = name.removesuffix(".weight"), name.endswith(".weight") and weight.dim() == 2
        if not is_weight or re.search(how.plain, module):
            packed_tensors[named(name)] = plain_tensors[name] = weight
            plain += [named(module)] if is_weight else []
            continue
        own = replace(how, bits=8) if how.eight and re.search(how.eight, module) else how
        wide |= {named(module): {"bits": 8, "group_size": how.group}} if own is not how else {}
        if how.layout == "compressed-tensors":
            codes = quantise(weight, own)
            tensors, plain_tensors[name] = stored(codes, own), codes.numbers()
        else:
            tensors, plain_tensors[name] = write(weight, own)
        packed_tensors |= {named(f"{module}.{each}"): tensor.contiguous() for each, tensor in tensors.items()}
    if how.layout == "mlx":
        packed_tensors = as_mlx(packed_tensors)
    config = json.loads((model / "config.json").read_text())
    if how.wrapped:
        config = wrap(config)
        packed_tensors |= vision_part(config, how)
    for path, weights in ((packed, packed_tensors), (numbers, plain_tensors)):
        shutil.copytree(model, path)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = configuration(how, plain) | wide
    (packed / "config.json").write_text(json.dumps(config))
    return packed, numbers
