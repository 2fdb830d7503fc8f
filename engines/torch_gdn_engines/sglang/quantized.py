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

from torch_gdn.quantized import configuration
from torch_gdn.quantized.formats import Format, Sizes, Stored, refusal, shapes_in
from torch_gdn_engines import packed_methods
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


class PackedLinearMethod(packed_methods.Linear, LinearMethodBase):
    def parameter_of(self, stored: Stored, data: Tensor, attributes: dict[str, Any]) -> Parameter:
        load = self.loading(stored, stored.name, functools.partial(self.load, stored), self.rows_of)
        parameter: Any = packed_methods.as_parameter(data, load)
        # Qwen3.5 replaces a parameter's loader by one that splits a file's tensor by rows, which blocks of scales do
        # not have. It replaces this attribute if there is one. `load` takes a tensor of several matrices whole.
        parameter._weight_loader = None
        return parameter

    def load(self, stored: Stored, parameter: Tensor, loaded: Tensor, shard: Any = None) -> None:
        """Loads all rows, or those of one matrix of a fused layer, or of several that follow each other."""
        part_of_first, part_of_last = self.parts_of(shard)
        per_word = self.packing.per_word if stored.rows == "word" else 1
        first, end = sum(self.rows[:part_of_first]) // per_word, sum(self.rows[: part_of_last + 1]) // per_word
        self.fill(parameter.data.narrow(int(stored.transposed), first, end - first), loaded, stored.name)


class PackedExpertsMethod(packed_methods.Experts, FusedMoEMethodBase):
    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        if not kernels.are_plain_experts(moe_runner_config):
            raise NotImplementedError(f"{self.name}: expected packed experts with SiLU and no limits on mps")

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        return StandardCombineInput(hidden_states=kernels.routed_experts(layer, x, weights, ids))


class PackedConfig(packed_methods.Config, QuantizationConfig):
    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self.packed: set[str] = set()  # names of the matrices that layers load packed

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, (LinearBase, FusedMoE)):
            return None
        name = plain_name(prefix)
        names = self.names_of(layer, name)
        if matrices := self.format.matrices(prefix, names, self.shapes):
            self.packed |= set(names)
            method = PackedExpertsMethod if isinstance(layer, FusedMoE) else PackedLinearMethod
            return method(self.format, prefix, matrices)
        if f"{name}.gate_up_proj" not in self.shapes and any(f"{each}.weight" not in self.shapes for each in names):
            raise ValueError(f"{prefix}: expected a weight of {', '.join(names)} in the files, got none")
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def names_of(self, layer: Any, name: str) -> list[str]:
        """Returns the names of a layer's matrices in the files. For experts, returns those of the first one."""
        if isinstance(layer, FusedMoE):
            return [f"{name}.0.{part}" for part in EXPERT]
        stem, _, last = name.rpartition(".")
        is_fused = f"{name}.weight" in self.shapes or self.format.tensors_of(name, self.shapes)
        return [name] if is_fused or last not in PARTS else [f"{stem}.{part}" for part in PARTS[last]]

    def check_that_all_is_loaded(self) -> None:
        """Refuses packed matrices that no layer takes, such as an embedding. SGLang would log them and continue."""
        scales = f".{self.format.tensors[1].name}"
        stored = {name.removesuffix(scales) for name in self.shapes if name.endswith(scales)}
        firsts = {re.sub(r"\.experts\.\d+\.", ".experts.0.", name) for name in stored}
        if unread := sorted(firsts - self.packed):
            raise ValueError(f"{unread[0]}: SGLang needs this weight unquantised; the checkpoint has it packed")


FORMATS = {
    **dict.fromkeys(("gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("awq", "awq_marlin"), "awq"),
    **{name: name for name in ("compressed-tensors", "auto-round", "fp8")},
    **dict.fromkeys(("modelopt", "modelopt_fp8"), "modelopt"),
}


def register() -> None:
    for method, name in FORMATS.items():
        attributes = {"method": method, "read": configuration.READERS[name]}
        QUANTIZATION_METHODS[method] = type("PackedConfig", (PackedConfig,), attributes)


def with_shapes(original: Callable[..., Any], model_config: Any, load_config: Any) -> Any:
    """Wraps _get_quantization_config: adds the shapes of the files' tensors."""
    config = original(model_config, load_config)
    if isinstance(config, PackedConfig):
        config.shapes = config.format.by_expert(shapes_of(model_config, load_config))
        model_config.torch_gdn_packed = config
    return config


def shapes_of(model_config: Any, load_config: Any) -> dict[str, Sizes]:
    from huggingface_hub import snapshot_download

    folder = Path(model_config.model_path)
    if not folder.is_dir():
        options = {"revision": model_config.revision, "cache_dir": load_config.download_dir}
        folder = Path(snapshot_download(model_config.model_path, allow_patterns="*.safetensors", **options))
    shapes = shapes_in(sorted(folder.glob("*.safetensors")))
    return {plain_name(name): shape for name, shape in shapes.items() if "mtp" not in name and "visual" not in name}


def without_ignored(
    original: Callable[..., Iterator[tuple[str, Tensor]]], loader: Any, model_config: Any, model: Any
) -> Iterator[tuple[str, Tensor]]:
    """Wraps DefaultModelLoader._get_all_weights: drops the tensors that say nothing new."""
    config, tensors = getattr(model_config, "torch_gdn_packed", None), original(loader, model_config, model)
    if config is None:
        return tensors
    config.check_that_all_is_loaded()
    ignored = tuple(f".{name}" for name in config.format.ignored)
    return ((name, tensor) for name, tensor in tensors if not name.endswith(ignored))


def allow_packed_weights(original: Callable[..., None], model_config: Any, **options: Any) -> None:
    """Wraps validate_mps_model_config: refuses the formats without kernels before a model is loaded."""
    method = model_config.quantization
    if method not in (None, "unquant"):
        written = resolve_checkpoint_quant_spec(model_config.hf_config)
        if written is None:
            raise refusal(f"--quantization {method} of an unquantised checkpoint")
        if method not in FORMATS:
            raise refusal(method)
        configuration.READERS[FORMATS[method]](written.config)
        model_config = copy.copy(model_config)
        model_config.quantization = None
    original(model_config, **options)
