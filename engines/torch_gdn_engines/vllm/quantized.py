"""Registers the configurations and loaders of quantised checkpoints on mps.

A configuration says which format the files have, and the files which layers are packed. A format without kernels in
torch_gdn is refused when the configuration is read or the layer is made.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader import register_model_loader

from torch_gdn.quantized import configuration
from torch_gdn.quantized.formats import refusal
from torch_gdn_engines.vllm import mlx_files, moe
from torch_gdn_engines.vllm.quantized_layers import PackedConfig, PackedLoader, classes_of_experts


class PackedAutoRoundConfig(PackedConfig):
    method, read = "inc", staticmethod(configuration.READERS["auto-round"])

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> Any:
        return "inc" if hf_quant_cfg.get("quant_method") == "auto-round" else None


def packed_config(method: str, name: str) -> type[PackedConfig]:
    """Makes the class of the format `name`, which vLLM calls `method`. vLLM's processes pickle it by its name here."""
    attributes = {"method": method, "read": configuration.READERS[name], "__module__": __name__}
    own = f"PackedConfig {name}"
    globals()[own] = result = type(own, (PackedConfig,), attributes)
    return result


GPTQ, AWQ = packed_config("auto_gptq", "gptq"), packed_config("auto_awq", "awq")
CONFIGURATIONS: dict[str, type] = {
    "compressed-tensors": packed_config("compressed-tensors", "compressed-tensors"),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), GPTQ),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), AWQ),
    "fp8": packed_config("fp8", "fp8"),
    "modelopt": packed_config("modelopt", "modelopt"),
    "inc": PackedAutoRoundConfig,
    "mlx": mlx_files.PackedMLXConfig,
}
LOADERS = {"torch_gdn_packed": PackedLoader, "torch_gdn_mlx": mlx_files.MLXLoader}


def load_format_of(method: str | None, asked: str) -> str:
    """Returns the load_format for a model: vLLM makes some heads without asking the configuration for their method."""
    if method == "mlx":
        return "torch_gdn_mlx"
    return "torch_gdn_packed" if method in CONFIGURATIONS and asked in ("auto", "safetensors") else asked


def verify(method: str) -> None:
    if method not in CONFIGURATIONS:
        raise refusal(method)


def register() -> None:
    for name, config in CONFIGURATIONS.items():
        register_quantization_config(name)(config)
    for load_format, loader in LOADERS.items():
        register_model_loader(load_format)(loader)
    MoERunner.forward = moe.with_shared_expert(MoERunner.forward, classes_of_experts)
