"""Finds the format that a model's configuration names."""

from collections.abc import Callable, Mapping
from typing import Any

from torch_gdn.quantized import compressed_tensors, floats, gptq, mlx
from torch_gdn.quantized.formats import Format, OtherFormat, refusal

READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "auto-round": gptq.read_auto_round,
    "awq": gptq.read_awq,
    "compressed-tensors": compressed_tensors.read,
    "fp8": floats.read_fp8,
    "gptq": gptq.read,
    "mlx": mlx.read,
    "modelopt": floats.read_modelopt,
}


def read(config: Mapping[str, Any]) -> Format:
    """Returns the format of a model's files.

    Args:
        config: the `quantization_config` of its config.json.

    Raises:
        OtherFormat: torch_gdn has no kernels for the weights.
        ValueError: it has, but not for the layout.

    Example:
        >>> from torch_gdn.quantized import configuration
        >>> form = configuration.read({"quant_method": "awq", "bits": 4, "version": "gemm"})
        >>> form.packing("a.b", {"qweight": (64, 4), "qzeros": (2, 4), "scales": (2, 32)}, columns=64).group_size
        32
    """
    method = config.get("quant_method") or ("mlx" if mlx.is_mlx(config) else None)
    if method not in READERS:
        raise refusal(method or "a quantization_config without a quant_method", OtherFormat)
    return READERS[method](config)
