"""Loads quantised checkpoints: SGLang's configurations of the published formats, with torch_gdn's layers.

A layer with packed tensors in the files is packed, whatever the lists of a configuration say. One that has neither
packed tensors nor a weight there is refused.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_loader.checkpoint_quantization import resolve_checkpoint_quant_spec
from torch import Tensor
from torch.nn import Parameter

from torch_gdn_engines import packed
from torch_gdn_engines.sglang import kernels

# These are the matrices of SGLang's fused layers, in order. Qwen3-Next's files may have the fused one.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
EXPERT = ("gate_proj", "up_proj", "down_proj")


def plain_name(name: str) -> str:
    """Returns a tensor's or layer's name, from its layer on, by which files and SGLang's models agree."""
    return re.sub(r"^.*?\b(?=layers\.)|\.(self_attn|linear_attn)\b", "", name)


class PackedLinearMethod(packed.Linear, LinearMethodBase):
    def parameter_of(self, stored: packed.Stored, data: Tensor, attributes: dict[str, Any]) -> Parameter:
        load = self.packing.loading(stored.name, functools.partial(self.load, stored))
        return packed.as_parameter(data, self.loaded.noting(stored.name, load))

    def load(self, stored: packed.Stored, parameter: Tensor, loaded: Tensor, shard: Any = None) -> None:
        """Loads all rows, or those of one matrix of a fused layer, or of several that follow each other."""
        shards = [0, len(self.rows) - 1] if shard is None else list(shard) if isinstance(shard, tuple) else [shard]
        numbers = ["qkv".index(each) if isinstance(each, str) else each for each in shards]
        per_word = self.packing.per_word if stored.packed == "rows" else 1
        first, end = sum(self.rows[: numbers[0]]) // per_word, sum(self.rows[: numbers[-1] + 1]) // per_word
        part = parameter.data.narrow(int(stored.is_transposed), first, end - first)
        if loaded.shape != part.shape:
            raise ValueError(
                f"{self.name}: expected {stored.name} of shape {tuple(part.shape)}, got {tuple(loaded.shape)}"
            )
        part.copy_(loaded)


class PackedExpertsMethod(packed.Experts, FusedMoEMethodBase):
    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        if not kernels.are_plain_experts(moe_runner_config):
            raise NotImplementedError(f"{self.name}: expected packed experts with SiLU and no limits on mps")

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        return StandardCombineInput(hidden_states=kernels.routed_experts(layer, x, weights, ids))


class PackedConfig(packed.LayoutConfig, QuantizationConfig):
    def __init__(self, layout: packed.Layout | packed.OneScheme) -> None:
        super().__init__(layout)
        self.shapes: dict[str, packed.Sizes] = {}
        self.loaded: set[str] = set()  # names of the matrices that layers load packed

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, FusedMoE)):
            return None
        name = plain_name(prefix)
        names = self.names_of(layer, name)
        packing = packed.packing_of_layer(self.layout, self.shapes, prefix, names)
        if packing is not None:
            self.loaded |= set(names)
            return (PackedExpertsMethod if isinstance(layer, FusedMoE) else PackedLinearMethod)(packing, prefix)
        if f"{name}.gate_up_proj" not in self.shapes and any(f"{each}.weight" not in self.shapes for each in names):
            raise ValueError(f"{prefix}: expected a weight of {', '.join(names)} in the files, got none")
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def names_of(self, layer: Any, name: str) -> list[str]:
        """Returns the names of a layer's matrices in the files. For experts, returns those of the first one."""
        if isinstance(layer, FusedMoE):
            return [f"{name}.0.{part}" for part in EXPERT]
        stem, _, last = name.rpartition(".")
        is_fused = any(f"{name}.{tensor}" in self.shapes for tensor in ("weight", "qweight", "weight_packed"))
        return [name] if is_fused or last not in PARTS else [f"{stem}.{part}" for part in PARTS[last]]

    def check_that_all_is_loaded(self) -> None:
        """Refuses packed matrices that no layer takes, such as an embedding. SGLang would log them and continue."""
        stored = [name.rpartition(".") for name in self.shapes]
        packed_in_files = {name for name, _, tensor in stored if tensor in ("qweight", "weight_packed")}
        firsts = {re.sub(r"\.experts\.\d+\.", ".experts.0.", name) for name in packed_in_files}
        if left := sorted(firsts - self.loaded):
            raise ValueError(f"{left[0]}: expected a weight of numbers for this layer in SGLang, got a packed one")


FORMATS = {
    "compressed-tensors": packed.compressed_tensors,
    **dict.fromkeys(("gptq", "gptq_marlin"), packed.gptq),
    **dict.fromkeys(("awq", "awq_marlin"), packed.awq),
    "auto-round": packed.auto_round,
}


def register() -> None:
    for method, read in FORMATS.items():
        QUANTIZATION_METHODS[method] = type("PackedConfig", (PackedConfig,), {"method": method, "read": read})


def with_shapes(theirs: Callable[..., Any], model_config: Any, load_config: Any) -> Any:
    """Wraps _get_quantization_config: adds the shapes of the files' tensors."""
    config = theirs(model_config, load_config)
    if isinstance(config, PackedConfig):
        config.shapes = shapes_of(model_config, load_config)
        model_config.torch_gdn_packed = config
    return config


def shapes_of(model_config: Any, load_config: Any) -> dict[str, packed.Sizes]:
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = Path(model_config.model_path)
    if not folder.is_dir():
        options = {"revision": model_config.revision, "cache_dir": load_config.download_dir}
        folder = Path(snapshot_download(model_config.model_path, allow_patterns="*.safetensors", **options))
    shapes: dict[str, packed.Sizes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            of_text = [name for name in opened.keys() if "mtp" not in name and "visual" not in name]  # noqa: SIM118
            shapes |= {plain_name(name): tuple(opened.get_slice(name).get_shape()) for name in of_text}
    return shapes


def without_written_shapes(
    theirs: Callable[..., Iterator[tuple[str, Tensor]]], loader: Any, model_config: Any, model: Any
) -> Iterator[tuple[str, Tensor]]:
    """Wraps DefaultModelLoader._get_all_weights: drops the shapes that compressed-tensors stores as tensors."""
    if (config := getattr(model_config, "torch_gdn_packed", None)) is not None:
        config.check_that_all_is_loaded()
    return (
        (name, tensor) for name, tensor in theirs(loader, model_config, model) if not name.endswith(".weight_shape")
    )


def allow_packed_weights(theirs: Callable[..., None], model_config: Any, **options: Any) -> None:
    """Wraps validate_mps_model_config: refuses the formats without kernels before a model is loaded."""
    method = model_config.quantization
    if method not in (None, "unquant"):
        written = resolve_checkpoint_quant_spec(model_config.hf_config)
        if written is None:
            raise packed.refusal(f"--quantization {method} of an unquantised checkpoint")
        if method not in FORMATS:
            raise packed.refusal(method)
        FORMATS[method](written.config)
        model_config = copy.copy(model_config)
        model_config.quantization = None
    theirs(model_config, **options)
