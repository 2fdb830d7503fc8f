"""Tests the conversion of published layouts of quantised weights, against what the tools that wrote them compute."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.packed_models import float8
from torch_gdn.quantized import (
    PackedWeight,
    configuration,
    from_auto_round,
    from_awq,
    from_compressed_tensors,
    from_float8,
    from_gptq,
    from_mlx,
    from_mxfp4,
    pack,
    packed_weight,
    stack,
    unpack,
)
from torch_gdn.quantized.floats import by_row
from torch_gdn.quantized.packed_weight import combined

RECORDED = (
    Path(__file__).parents[1] / "golden" / "quantized" / "layers.safetensors"
)  # record.py in that folder writes it
N, K, GROUP = 32, 64, 32
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def layers() -> dict[str, dict[str, Tensor]]:
    result: dict[str, dict[str, Tensor]] = {}
    for name, x in load_file(RECORDED).items():
        layer, tensor = name.split(".")
        result.setdefault(layer, {})[tensor] = x
    return result


def convert(layer: str, tensors: dict[str, Tensor]) -> PackedWeight:
    bits = 8 if "8" in layer else 4
    tensors = {name: x for name, x in tensors.items() if name not in ("dequantized", "weight_shape")}
    if layer.startswith("ct"):
        return from_compressed_tensors(**tensors, bits=bits)
    if layer.startswith("awq"):
        return from_awq(**tensors)
    return from_gptq(**tensors, bits=bits, checkpoint_format="gptq_v2" if "v2" in layer else "gptq")


def assert_equal(weight: PackedWeight, expected: Tensor, rounded_to: torch.dtype = torch.float32) -> None:
    """Asserts that each number is right up to one rounding of the tool's."""
    exact = weight_on_cpu(weight).dequantize(torch.float64)
    error = (exact - expected.cpu()).abs()
    assert (error <= torch.finfo(rounded_to).eps * exact.abs()).all(), error.max()


def weight_on_cpu(weight: PackedWeight) -> PackedWeight:
    order = None if weight.order is None else weight.order.cpu()
    return PackedWeight(weight.weight.cpu(), weight.scales.cpu(), weight.biases.cpu(), weight.bits, order)


@pytest.mark.parametrize(
    "layer",
    [
        "ct_4",
        "ct_4_zero",
        "ct_8_channel",
        "ct_8_zero_channel",
        "gptq_4",
        "gptq_4_zero",
        "gptq_8_zero",
        "gptq_v2_4_zero",
        "gptq_v2_8",
        "awq_4",
    ],
)
def test_equals_the_tools_own_numbers(layers: dict[str, dict[str, Tensor]], layer: str, device: torch.device) -> None:
    tensors = {name: x.to(device) for name, x in layers[layer].items()}
    weight = convert(layer, tensors)
    assert weight.shape == (N, K)
    assert weight.group_size == (64 if "channel" in layer else GROUP)
    in_32_bits, in_16_bits = (torch.float32, torch.float32), (torch.float16, torch.uint8)
    assert weight.dtypes == (in_32_bits if layer.startswith("ct") else in_16_bits)
    assert weight.order is None
    assert_equal(weight, tensors["dequantized"], torch.float32 if layer.startswith("ct") else torch.float16)


@pytest.mark.parametrize(
    ("packing_format", "layer"),
    [
        ("auto_round:auto_gptq", "gptq_4_zero"),
        ("auto_round", "gptq_v2_4_zero"),
        ("auto_round:gptqmodel", "gptq_v2_8"),
        ("auto_round:auto_awq", "awq_4"),
    ],
)
def test_auto_round_names_the_layout(layers: dict[str, dict[str, Tensor]], packing_format: str, layer: str) -> None:
    tensors = dict(layers[layer])
    expected = tensors.pop("dequantized")
    weight = from_auto_round(**tensors, bits=8 if "8" in layer else 4, packing_format=packing_format)
    assert_equal(weight, expected, torch.float16)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
def test_mlx_is_a_view(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is installed on Linux and on macOS alone")
    numbers = mx.random.normal((N, 128))
    quantized = mx.quantize(numbers, group_size=group, bits=bits)
    words, scales, biases = (torch.from_dlpack(x) for x in quantized)
    weight = from_mlx(words, scales, biases, bits=bits)
    assert weight.weight.data_ptr() == words.data_ptr()
    assert weight.group_size == group
    numbers_of_mlx = torch.from_dlpack(mx.dequantize(*quantized, group_size=group, bits=bits))
    torch.testing.assert_close(weight.dequantize(), numbers_of_mlx, rtol=0, atol=1e-6)


def gptq_tensors(bits: int, groups: int, g_idx: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a GPTQ layer, and its numbers in float32. It is made here because no installable tool writes desc_act."""
    codes = torch.randint(2**bits, (K, N))
    zeros = torch.randint(1, 2**bits, (groups, N))
    scales = torch.rand(groups, N).half()
    tensors = {"qweight": pack(codes.T, bits).T, "qzeros": pack(zeros - 1, bits), "scales": scales, "g_idx": g_idx}
    return tensors, (scales.float()[g_idx] * (codes - zeros[g_idx])).T


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order_sorts_the_columns(bits: int) -> None:
    torch.manual_seed(0)
    g_idx = (torch.arange(K) // GROUP)[torch.randperm(K)]
    tensors, expected = gptq_tensors(bits, K // GROUP, g_idx)
    weight = from_gptq(**tensors, bits=bits)
    assert_equal(weight, expected)
    assert weight.order is not None
    x = torch.randn(3, K)
    sorted_alone = PackedWeight(weight.weight, weight.scales, weight.biases, bits)
    y = x[:, weight.order] @ sorted_alone.dequantize().T
    torch.testing.assert_close(y, x @ expected.T, rtol=1e-4, atol=1e-5 * 2**bits)


@pytest.mark.parametrize("rows", [1, 11, 12])
def test_zero_points_may_end_within_a_word(rows: int) -> None:
    codes, zeros, scales = torch.randint(16, (rows, K)), torch.randint(16, (rows, 2)), torch.ones(rows, 2)
    stored = pack(torch.nn.functional.pad(zeros.T, (0, -rows % 8)), 4).T
    weight = from_compressed_tensors(pack(codes, 4), scales, stored, bits=4)
    assert_equal(weight, (scales[..., None] * (codes.view(rows, 2, GROUP) - zeros[..., None])).flatten(1))


def test_act_order_of_compressed_tensors() -> None:
    """Older files have `weight_g_idx`. compressed-tensors 0.20 neither writes nor reads it."""
    torch.manual_seed(0)
    g_idx = (torch.arange(K) // GROUP)[torch.randperm(K)]
    codes, scales = torch.randint(16, (N, K)), torch.rand(N, K // GROUP).half().float()
    weight = from_compressed_tensors(pack(codes, 4), scales, weight_g_idx=g_idx, bits=4)
    assert_equal(weight, (codes - 8) * scales[:, g_idx])


def test_experts_convert_as_their_layers_do(layers: dict[str, dict[str, Tensor]]) -> None:
    """In each format, experts with a leading dimension equal layers that are converted one by one and stacked."""
    for layer in ("ct_4_zero", "gptq_8_zero", "awq_4"):
        tensors = {name: x for name, x in layers[layer].items() if name not in ("dequantized", "weight_shape")}
        flipped = {name: x.flip(-1) for name, x in tensors.items()}
        both = convert(layer, {name: torch.stack([tensors[name], flipped[name]]) for name in tensors})
        one_by_one = stack([convert(layer, tensors), convert(layer, flipped)])
        assert both.shape == (2, N, K)
        for name in ("weight", "scales", "biases"):
            assert torch.equal(getattr(both, name), getattr(one_by_one, name)), (layer, name)


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_float8_keeps_the_files_bytes(strategy: str, device: torch.device) -> None:
    torch.manual_seed(0)
    tensors, numbers = float8(torch.randn(200, 300), "weight_scale", strategy)
    stored = tensors["weight"].view(torch.uint8)
    weight = from_float8(stored.to(device), tensors["weight_scale"].to(device))
    assert weight.weight.dtype == torch.uint8 and torch.equal(weight.weight.cpu(), stored)
    assert weight.scales.numel() == tensors["weight_scale"].numel()
    on_cpu = PackedWeight(weight.weight.cpu(), weight.scales.cpu(), None, 8)
    assert torch.equal(on_cpu.dequantize(torch.float64), numbers_in_float64(tensors))
    torch.testing.assert_close(on_cpu.dequantize(), numbers)


def numbers_in_float64(tensors: dict[str, Tensor]) -> Tensor:
    codes, scales = tensors["weight"].double(), tensors["weight_scale"].double()
    if scales.dim() == 0 or scales.shape[1] == 1:
        return codes * scales
    return codes * scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]


@pytest.mark.parametrize(("rows", "scale_rows"), [(256, 4), (200, 400)])
def test_float8_matrices_under_each_other(rows: int, scale_rows: int) -> None:
    """Blocks stay blocks, unless those of the second matrix begin within one. Then each row has its scales."""
    torch.manual_seed(0)
    made = [float8(torch.randn(rows, 130) * (1 + i), "weight_scale") for i in range(2)]
    both = combined([from_float8(**tensors) for tensors, _ in made], torch.cat)
    assert both.scales.shape == (scale_rows, 2)
    assert torch.equal(both.dequantize(torch.float64), torch.cat([numbers_in_float64(tensors) for tensors, _ in made]))
    for tensors, _ in made:  # as engines hold them
        weight = from_float8(tensors["weight"], by_row("weight_scale", tensors["weight_scale"], rows))
        assert torch.equal(weight.dequantize(torch.float64), numbers_in_float64(tensors))


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(("rows", "scales"), [(256, 2), (200, 200)], ids=["blocks", "rows"])
def test_an_engine_cuts_fused_experts(rows: int, scales: int) -> None:
    shapes = configuration.read(FP8).by_expert({FUSED: (4, rows, 130), f"{FUSED}_scale_inv": (4, scales, 2)})
    for part in ("gate_proj", "up_proj"):
        name = FUSED.replace("gate_up_proj", f"0.{part}")
        assert shapes[f"{name}.weight"] == (rows // 2, 130)
        assert shapes[f"{name}.weight_scale_inv"] == (scales // 2, 2)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [((4, 448, 128), (4, 4, 1)), ((4, 384, 128), (4, 3, 1)), ((4, 256, 128), (4, 1, 1)), ((4, 256, 128), (4,))],
    ids=["a block of both", "odd blocks", "one for both", "one for all"],
)
def test_fused_experts_that_an_engine_would_cut_wrongly_are_refused(codes: Any, scales: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{FUSED}_scale_inv: expected .* of rows, or of blocks of 128 rows of gate"):
        configuration.read(FP8).by_expert({FUSED: codes, f"{FUSED}_scale_inv": scales})


def test_stack_of_unlike_scales_is_float32(layers: dict[str, dict[str, Tensor]]) -> None:
    tensors = layers["gptq_4_zero"]
    weights = [convert("gptq_4_zero", tensors | {"scales": tensors["scales"].to(x)}) for x in (torch.half, torch.float)]
    both = stack(weights)
    assert both.dtypes == (torch.float32, torch.float32)
    assert all(
        torch.equal(result, weight.dequantize()) for result, weight in zip(both.dequantize(), weights, strict=True)
    )


def test_large_groups_are_divided() -> None:
    words = torch.randint(-(2**31), 2**31, (N, 512 // 8), dtype=torch.int64).int()
    scales = torch.rand(N, 2).half().float()
    weight = from_compressed_tensors(words, scales, bits=4)
    assert weight.group_size == 128
    assert_equal(weight, (unpack(words, 4) - 8) * scales.repeat_interleave(256, dim=1))


def test_a_single_group_is_laid_out_as_the_ops_want_it() -> None:
    tensors, expected = gptq_tensors(4, 1, torch.zeros(K, dtype=torch.int64))
    weight = from_gptq(**tensors, bits=4)
    assert weight.scales.shape == (N, 1)
    assert weight.scales.stride(-1) == weight.biases.stride(-1) == 1
    assert_equal(weight, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_pack_is_the_inverse_of_unpack(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31, (3, 5, 8), dtype=torch.int64).int()
    codes = unpack(words, bits)
    assert codes.min() >= 0
    assert codes.max() == 2**bits - 1
    assert torch.equal(pack(codes, bits), words)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def packed(**changes: Any) -> PackedWeight:
    given = {"weight": words(N, 8), "scales": torch.ones(N, 2), "biases": torch.ones(N, 2), "bits": 4}
    return PackedWeight(**(given | changes))


def gptq(**changes: Any) -> PackedWeight:
    tensors, _ = gptq_tensors(4, K // GROUP, torch.arange(K) // GROUP)
    return from_gptq(**(tensors | {"bits": 4} | changes))


def awq(*sizes: int, columns: int = N, **changes: Any) -> PackedWeight:
    return from_awq(words(*sizes[:2]), words(*sizes[2:]), torch.rand(sizes[2], columns), **changes)


def compressed(*sizes: int, **changes: Any) -> PackedWeight:
    return from_compressed_tensors(words(N, 8), torch.rand(*sizes), **({"bits": 4} | changes))


def fp8_files(weight: tuple[int, int], scales: tuple[int, int]) -> Any:
    return configuration.read(FP8).packing("layer", {"weight": weight, "weight_scale_inv": scales}, K, N)


BYTES, NONE = torch.zeros(N, K, dtype=torch.uint8), torch.zeros(N, 2, dtype=torch.uint8)
E4M3 = {"weight": BYTES, "scales": torch.ones(1, 1), "biases": None, "bits": 8}
FOUR = {"scales": NONE, "biases": None}
SHUFFLED = torch.arange(K) % 2
REFUSALS: dict[str, Callable[[], Any]] = {
    "from_gptq: bits, 3 bits": lambda: gptq(bits=3),
    "from_gptq: checkpoint_format, an unknown format": lambda: gptq(checkpoint_format="marlin"),
    "from_gptq: scales, scales of other rows": lambda: gptq(scales=torch.rand(2, 8)),
    "from_gptq: qzeros, zero points of other rows": lambda: gptq(qzeros=words(2, 2)),
    "from_gptq: g_idx, a group for other columns": lambda: gptq(g_idx=SHUFFLED[:2]),
    "from_gptq: g_idx, groups of other sizes": lambda: gptq(g_idx=(torch.arange(K) // 16).clamp(max=1)),
    "from_gptq: qweight, words of floats": lambda: gptq(qweight=torch.rand(8, N)),
    "from_gptq: qweight, a row of words": lambda: gptq(qweight=words(8)),
    "from_compressed_tensors: g_idx, act-order within experts": lambda: from_compressed_tensors(
        words(2, N, 8), torch.rand(2, N, 2), weight_g_idx=torch.stack([SHUFFLED] * 2), bits=4
    ),
    "from_compressed_tensors: group size, groups of 16": lambda: compressed(N, 4),
    "from_compressed_tensors: scales, groups of a part of a column": lambda: compressed(N, 3),
    "from_compressed_tensors: scales, no groups": lambda: compressed(N, 0),
    "from_compressed_tensors: weight_scale, other rows than words": lambda: compressed(8, 2),
    "from_compressed_tensors: weight_zero_point, zero points of other groups": lambda: compressed(
        N, 2, weight_zero_point=words(4, 1)
    ),
    "from_awq: bits, AWQ of 8 bits": lambda: awq(K, 4, 2, 4, bits=8),
    "from_awq: scales, AWQ's scales of other rows": lambda: awq(K, 4, 2, 4, columns=8),
    "from_awq: qzeros, AWQ's zero points of other groups": lambda: from_awq(words(K, 4), words(1, 4), torch.rand(2, N)),
    "from_awq: qzeros, AWQ's zero points of other rows": lambda: from_awq(words(K, 4), words(2, 3), torch.rand(2, N)),
    "from_awq: qweight, AWQ of 60 columns": lambda: awq(60, 4, 2, 4),
    "from_auto_round: packing_format, AutoRound's fp8": lambda: from_auto_round(
        words(8, N), words(2, 4), torch.rand(2, N), bits=4, packing_format="auto_round:fp8_static"
    ),
    "from_mlx: bits, MLX of 6 bits": lambda: from_mlx(words(N, 12), torch.rand(N, 1), torch.rand(N, 1), bits=6),
    "PackedWeight: biases, biases of another dtype": lambda: packed(biases=torch.ones(N, 2).half()),
    "PackedWeight: biases, zero points of float32 scales": lambda: packed(biases=NONE),
    "PackedWeight: biases, biases of other groups": lambda: packed(biases=torch.ones(N, 1)),
    "PackedWeight: weight, words of 64 bits": lambda: packed(weight=torch.zeros(N, 4, dtype=torch.int64)),
    "PackedWeight: weight, a weight of one dimension": lambda: packed(weight=words(8)),
    "PackedWeight: scales, whole scales": lambda: packed(scales=torch.ones(N, 2, dtype=torch.int64)),
    "PackedWeight: scales, scales of other matrices": lambda: packed(scales=torch.ones(8, 2)),
    "PackedWeight: order, an order of other columns": lambda: packed(order=torch.arange(8)),
    "PackedWeight: biases, MXFP4 with biases": lambda: packed(scales=NONE),
    "PackedWeight: biases, MXFP4 of 8 bits": lambda: packed(**FOUR, weight=words(N, 16), bits=8),
    "PackedWeight: biases, MXFP4 in an order": lambda: packed(**FOUR, order=torch.arange(K)),
    "PackedWeight: scales, MXFP4 with scales of other groups": lambda: packed(scales=NONE[:, :1], biases=None),
    "from_mxfp4: scales, MXFP4 with scales of other dtypes": lambda: from_mxfp4(words(N, 8), torch.ones(N, 2)),
    "from_mxfp4: weight, MXFP4 in floats": lambda: from_mxfp4(torch.ones(N, 8), NONE),
    "from_mxfp4: weight, MXFP4 of 48 columns": lambda: from_mxfp4(words(N, 6), NONE),
    "PackedWeight: biases, e4m3 with biases": lambda: packed(**E4M3 | {"biases": torch.ones(1, 1)}),
    "PackedWeight: biases, e4m3 of 4 bits": lambda: packed(**E4M3 | {"bits": 4}),
    "PackedWeight: biases, e4m3 in an order": lambda: packed(**E4M3, order=torch.arange(K)),
    "PackedWeight: biases, no biases": lambda: packed(biases=None),
    "from_float8: weight, FP8 in another dtype": lambda: from_float8(torch.zeros(2, 2), torch.ones(1, 1)),
    "PackedWeight: scales, FP8 with scales of other blocks": lambda: from_float8(BYTES.repeat(7, 1), torch.ones(3, 1)),
    "PackedWeight: scales, FP8 with scales of other experts": lambda: from_float8(BYTES[None], torch.ones(2, 1, 1)),
    "weight, FP8 of bytes by row": lambda: by_row("weight", BYTES, N),
    "weight_scale, FP8 by row with scales of other blocks": lambda: by_row("weight_scale", torch.ones(3, 1), 200),
    "layer: weight, FP8 files of other columns": lambda: fp8_files((N, 32), (1, 1)),
    "layer: weight_scale_inv, FP8 files with scales of other blocks": lambda: fp8_files((N, K), (3, 3)),
    "stack: weights, experts of other shapes": lambda: stack(
        [packed(), packed(weight=words(8, 8), scales=ONES, biases=ONES)]
    ),
    "stack: weights, sorted experts": lambda: stack([packed(order=torch.arange(K))] * 2),
    "combined: weights, MXFP4 and others": lambda: combined([packed(), packed(**FOUR)], torch.cat),
    "pack: codes, codes that do not fill a word": lambda: pack(words(3), 4),
}
ONES = torch.ones(8, 2)
CONVERSIONS = Path(packed_weight.__file__).parent


def refused_at(what: str) -> tuple[str, int]:
    """Returns the module and line whose condition does not hold."""
    with pytest.raises(ValueError, match=rf"^{what.partition(', ')[0]}: expected .+, got .+") as raised:
        REFUSALS[what]()
    frames = [each for each in traceback.extract_tb(raised.tb) if Path(each.filename).parent == CONVERSIONS]
    return next((Path(each.filename).name, each.lineno or 0) for each in reversed(frames) if each.name != "expect")


def test_each_condition_of_the_conversions_refuses_something() -> None:
    seen = {refused_at(what) for what in REFUSALS}
    conditions = set()
    for path in CONVERSIONS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "expect":
                conditions.add((path.name, node.lineno))
    assert conditions <= seen
