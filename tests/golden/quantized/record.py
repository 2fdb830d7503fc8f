"""Records layers as the packers of compressed-tensors and AutoRound write them, and what their unpackers make of them.

python tests/golden/quantized/record.py     needs compressed-tensors and auto-round; writes layers.safetensors here

A layer is 32 rows of 64 columns in groups of 32. `<layer>.<tensor>` are the file's tensors, `<layer>.dequantized` is
what the tool computes from them, [N, K] in float32.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor, nn

N, K, GROUP = 32, 64, 32


def compressed_tensors_case(bits: int, symmetric: bool, strategy: str) -> dict[str, Tensor]:
    grouped = strategy == "group"
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=GROUP if grouped else None, type="int"
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = K // GROUP if grouped else 1
    scales = (3 * (0.5 + torch.rand(N, groups)) / 2**bits).bfloat16().float()  # as in a published model
    state = {"weight": torch.randn(N, K), "weight_scale": scales}
    half = 2 ** (bits - 1)
    zeros = torch.randint(-half, half, (N, groups), dtype=torch.int8)
    state["weight_zero_point"] = torch.zeros_like(zeros) if symmetric else zeros
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return packed | {"dequantized": PackedQuantizationCompressor.decompress(packed, scheme)["weight"].float()}


def drawn(bits: int, symmetric: bool) -> tuple[nn.Linear, Tensor, Tensor | int]:
    linear = nn.Linear(K, N, bias=False).requires_grad_(False)
    scales = (2 * (0.5 + torch.rand(N, K // GROUP)) / 2**bits / K**0.5).half().float()
    zeros = torch.randint(1, 2**bits, (N, K // GROUP)).float()  # AutoRound stores zp - 1, so 0 is impossible
    return linear, scales, 2 ** (bits - 1) if symmetric else zeros


def gptq_case(bits: int, symmetric: bool, packer: type[nn.Module]) -> dict[str, Tensor]:
    linear, scales, zeros = drawn(bits, symmetric)
    layer = packer(bits, GROUP, K, N, bias=False)
    layer.device = torch.device("cpu")
    layer.pack(linear, scales, zeros, device="cpu")
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    return tensors | {"dequantized": layer(torch.eye(K)).T}


def awq_case() -> dict[str, Tensor]:
    linear, scales, zeros = drawn(4, symmetric=False)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T, device="cpu")
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    return tensors | {"dequantized": dequantize_gemm(*tensors.values(), 4, GROUP).float().T}


def main() -> None:
    torch.manual_seed(0)
    layers = {
        "ct_4": compressed_tensors_case(4, True, "group"),
        "ct_4_zero": compressed_tensors_case(4, False, "group"),
        "ct_8_channel": compressed_tensors_case(8, True, "channel"),
        "ct_8_zero_channel": compressed_tensors_case(8, False, "channel"),
        "gptq_4": gptq_case(4, True, qlinear_torch_zp.QuantLinear),
        "gptq_4_zero": gptq_case(4, False, qlinear_torch_zp.QuantLinear),
        "gptq_8_zero": gptq_case(8, False, qlinear_torch_zp.QuantLinear),
        "gptq_v2_4_zero": gptq_case(4, False, qlinear_torch.QuantLinear),
        "gptq_v2_8": gptq_case(8, True, qlinear_torch.QuantLinear),
        "awq_4": awq_case(),
    }
    tensors = {f"{layer}.{name}": x.contiguous() for layer, result in layers.items() for name, x in result.items()}
    versions = {package: version(package) for package in ("compressed-tensors", "auto-round", "torch")}
    save_file(tensors, Path(__file__).with_name("layers.safetensors"), versions)


if __name__ == "__main__":
    main()
