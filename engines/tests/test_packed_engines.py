"""Tests that transformers, vLLM and SGLang read and refuse the same quantised files, by torch_gdn's adapters for each.

The engines are not installed here. Empty classes stand for theirs.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tests.helpers.packed_models import Format, write
from torch_gdn.integrations.transformers import loading_patches, versions
from torch_gdn.quantized import PackedWeight
from torch_gdn.quantized.formats import SUPPORTED
from torch_gdn_engines.packed_methods import as_parameter

if not versions.is_served(versions.installed()):
    pytest.skip("this transformers loads quantised files in another way", allow_module_level=True)
from torch_gdn.integrations.transformers.packed_layers import PackedLinear
from torch_gdn.integrations.transformers.packed_loading import Pack, PackExperts

ENGINES = ("transformers", "vllm", "sglang")
LAYER, PARTS = "model.layers.0.mlp", ("gate_proj", "up_proj")
N, K = 16, 128
Tensors = dict[str, dict[str, Tensor]]  # of each matrix


class Anything(type):
    """The type of classes that have any attribute and are generic."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Empty(ModuleType):
    """A module that has any class, and any function, which returns its first argument."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = Anything(name, (), {}) if name[0].isupper() else lambda given, *others: given
        setattr(self, name, value)
        return value


class Finder:
    def find_spec(self, name: str, *others: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ENGINES[1:] else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture(scope="module")
def adapters() -> Iterator[dict[str, Any]]:
    before, finder = set(sys.modules), Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        parameters: Any = importlib.import_module("vllm.model_executor.parameter")
        for name in ("GroupQuantScaleParameter", "PackedvLLMParameter", "BasevLLMParameter"):
            setattr(parameters, name, parameter)
        made = {each: importlib.import_module(f"torch_gdn_engines.{each}.quantized") for each in ENGINES[1:]}
        layers: Any = sys.modules["torch_gdn_engines.vllm.layers"]
        layers.get_current_vllm_config = lambda: SimpleNamespace(lora_config=None)
        layers = sys.modules["vllm.model_executor.layers.fused_moe"]
        layers.FusedMoEMethodBase.__init__ = lambda self, config: None
        yield made
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in set(sys.modules) - before:
            if re.match(r"(torch_gdn_engines\.)?(vllm|sglang)\b", name):
                parent, _, last = name.rpartition(".")
                vars(sys.modules.get(parent, sys)).pop(last, None)
                del sys.modules[name]


def parameter(data: Tensor, weight_loader: Any, **dims: int) -> Any:
    made: Any = as_parameter(data, weight_loader)
    made.output_dim = dims.get("output_dim", 0)
    return made


def load_part(param: Any, loaded: Tensor, part: int) -> None:
    """Does what vLLM's loaders do with one matrix of a fused layer."""
    rows = loaded.shape[param.output_dim]
    param.data.narrow(param.output_dim, part * rows, rows).copy_(loaded)


def configured(engine: str, config: dict[str, Any], adapters: dict[str, Any]) -> Any:
    """Returns what the engine makes of a file's configuration: the adapter's object, or None to read it by itself."""
    if engine == "transformers":
        return loading_patches.packed_format(PreTrainedConfig(quantization_config=config), None, "mps", {})
    method = config.get("quant_method", "mlx")
    if engine == "vllm":
        method = "inc" if method == "auto-round" else method
        adapters[engine].verify(method)
        return adapters[engine].CONFIGURATIONS[method].from_config(config)
    written = SimpleNamespace(config=config)
    adapters[engine].resolve_checkpoint_quant_spec = lambda hf_config: written
    adapters[engine].allow_packed_weights(lambda model: None, SimpleNamespace(quantization=method, hf_config=None))
    kind = adapters[engine].FORMATS[method]
    attributes = {"method": method, "read": adapters[engine].configuration.READERS[kind]}
    return type("PackedConfig", (adapters[engine].PackedConfig,), attributes).from_config(config)


def read_by_transformers(form: Any, tensors: Tensors) -> Tensor:
    matrices = []
    for part in tensors.values():
        packing = form.packing("a.weight", {ending: tuple(x.shape) for ending, x in part.items()}, K, N)
        model = nn.ModuleDict({"a": PackedLinear(nn.Linear(K, N, bias=False, device="meta"), packing)})
        quantizer = SimpleNamespace(format=form, packings={"a.weight": packing}, dense=())
        result = Pack(quantizer).convert({f"a.{ending}": [x] for ending, x in part.items()}, "a.weight", model)
        order: Any = model["a"].order
        biases = result.get("a.biases")
        matrices.append(PackedWeight(result["a.weight"], result["a.scales"], biases, packing.bits, order).dequantize())
    return torch.cat(matrices)


def read_by_engine(engine: str, config: Any, tensors: Tensors, adapters: dict[str, Any]) -> Tensor:
    """Loads a fused layer as the engine does."""
    name = plain = f"{LAYER}.gate_up_proj"
    if engine == "sglang":
        plain = adapters[engine].plain_name(name)
    stem = plain.rpartition(".")[0]
    config.shapes = {f"{stem}.{part}.{e}": tuple(x.shape) for part, own in tensors.items() for e, x in own.items()}
    config.packed_modules_mapping = {"gate_up_proj": list(PARTS)}
    base = sys.modules["vllm.model_executor.layers.linear" if engine == "vllm" else "sglang.srt.layers.linear"]
    method = config.get_quant_method(base.LinearBase(), name)
    layer: Any = nn.Module()
    method.create_weights(layer, K, [N, N], K, 2 * N, torch.float32, weight_loader=load_part)
    for number, part in enumerate(PARTS):
        for ending, x in tensors[part].items():
            if ending not in config.format.ignored:
                param = getattr(layer, ending)
                param.weight_loader(param, x, number)
    method.process_weights_after_loading(layer)
    return PackedWeight(layer.weight, layer.scales, layer.biases, method.packing.bits, layer.order).dequantize()


def compressed_tensors(*schemes: dict[str, Any], **others: Any) -> dict[str, Any]:
    groups = {str(i): {"targets": ["Linear"], "weights": scheme} for i, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | others


def scheme(bits: int = 4, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32} | others


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
MLX = {"bits": 4, "group_size": 32}
READ: dict[str, tuple[dict[str, Any], Format]] = {
    "gptq": (GPTQ, Format("gptq")),
    "gptq_v2 in 8 bits": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, Format("gptq", 8, is_second=True)),
    "gptq, act-order": (GPTQ | {"desc_act": True}, Format("gptq", is_ordered=True)),
    "gptq, dynamic": (GPTQ | {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, Format("gptq", 8)),
    "awq": (AWQ, Format("awq")),
    "auto-round": (AUTO_ROUND, Format("auto-round")),
    "auto-round without a packing format": (
        {name: x for name, x in AUTO_ROUND.items() if name != "packing_format"},
        Format("auto-round"),
    ),
    "auto-round as gptq_v2": (
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"},
        Format("auto-round", is_second=True),
    ),
    "auto-round as awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        Format("auto-round", is_packed_as_awq=True),
    ),
    "compressed-tensors": (
        compressed_tensors(scheme(symmetric=True)),
        Format("compressed-tensors", is_symmetric=True),
    ),
    "compressed-tensors in 8 bits": (compressed_tensors(scheme(8)), Format("compressed-tensors", 8)),
    "compressed-tensors by rows": (
        compressed_tensors(scheme(strategy="channel", group_size=None)),
        Format("compressed-tensors", group=None),
    ),
    "compressed-tensors, mixed": (
        compressed_tensors(scheme(group_size=64), scheme(8)),
        Format("compressed-tensors", 8),
    ),
    "compressed-tensors, act-order": (
        compressed_tensors(scheme(actorder="group")),
        Format("compressed-tensors", is_ordered=True),
    ),
    "compressed-tensors, protected": (compressed_tensors(scheme(), ignore=["re:.*"]), Format("compressed-tensors")),
    "mlx": (MLX, Format("mlx")),
    "mlx, own bits": (MLX | {f"{LAYER}.gate_proj": {"bits": 8, "group_size": 64}}, Format("mlx", 8, 64)),
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def floats(strategy: str, **others: Any) -> dict[str, Any]:
    return compressed_tensors(scheme(8, type="float", strategy=strategy, **others), format="float-quantized")


MXFP4 = compressed_tensors(scheme(type="float", group_size=32), format="mxfp4-pack-quantized")
READ |= {
    "mxfp4": (MXFP4, Format("mxfp4")),
    "mlx, mxfp4": (MLX | {"mode": "mxfp4"}, Format("mlx mxfp4")),
    "fp8": (FP8, Format("fp8")),
    "compressed-tensors in blocks of floats": (floats("block", block_structure=[128, 128]), Format("fp8 block")),
    "compressed-tensors in rows of floats": (floats("channel"), Format("fp8 channel")),
    "compressed-tensors in floats": (floats("tensor"), Format("fp8 tensor")),
    "modelopt": (MODELOPT, Format("fp8 tensor")),
}
UNKNOWN_TO = {("sglang", "mlx"), ("sglang", "mlx, own bits"), ("sglang", "mlx, mxfp4")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", READ)
def test_reads(case: str, engine: str, adapters: dict[str, Any]) -> None:
    config, how = READ[case]
    if (engine, case) in UNKNOWN_TO:
        with pytest.raises(ValueError, match=f"^quantization: expected {re.escape(SUPPORTED)}, on mps, got mlx"):
            configured(engine, config, adapters)
        return
    torch.manual_seed(0)
    made = [write(torch.randn(N, K), how) for _ in PARTS]
    tensors = dict(zip(PARTS, (tensors for tensors, _ in made), strict=True))
    adapter = configured(engine, config, adapters)
    if engine == "transformers":
        weight = read_by_transformers(adapter, tensors)
    else:
        weight = read_by_engine(engine, adapter, tensors, adapters)
    expected = torch.cat([numbers for _, numbers in made])
    error = (weight - expected).abs()
    assert (error <= 4 * torch.finfo(torch.float32).eps * expected.abs().amax(-1, keepdim=True)).all(), error.max()


EXPERTS, WIDTH = 2, 64
PLACES = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}  # in the engines' experts


def experts_of_transformers(form: Any, files: list[Tensors]) -> list[Tensor]:
    result = []
    for names, columns in ((PARTS, K), (("down_proj",), WIDTH)):
        shapes = {ending: tuple(x.shape) for ending, x in files[0][names[0]].items()}
        bits = form.packing("a.weight", shapes, columns, WIDTH if len(names) == 2 else K).bits
        stored = {f"{name}.{e}": [each[name][e] for each in files] for name in names for e in shapes}
        if form.experts_are_stacked:
            stored = {name: [torch.stack(tensors)] for name, tensors in stored.items()}
        result.append(PackExperts(SimpleNamespace(format=form), names).packed(stored, bits).dequantize())
    return result


def experts_of_engine(engine: str, config: Any, files: list[Tensors], adapters: dict[str, Any]) -> list[Tensor]:
    """Loads experts as the engine does."""
    names = {f"ckpt_{name}_name": name for name in PLACES}
    if engine == "vllm":
        owner = sys.modules["vllm.model_executor.layers.fused_moe"].RoutedExperts
    else:
        owner = sys.modules["sglang.srt.layers.moe.fused_moe_triton.layer"].FusedMoE
    experts, prefix = owner(), f"{LAYER}.experts"
    vars(experts).update(names, moe_config=SimpleNamespace(activation=None, has_bias=False))
    stem = adapters[engine].plain_name(prefix) if engine == "sglang" else prefix
    config.shapes = {f"{stem}.0.{name}.{e}": tuple(x.shape) for name, own in files[0].items() for e, x in own.items()}
    config.packed_modules_mapping = {}
    method, layer = config.get_quant_method(experts, prefix), nn.Module()
    method.create_weights(layer, EXPERTS, K, WIDTH)
    for expert, matrices in enumerate(files):
        for name, (matrix, shard) in PLACES.items():
            for ending, x in matrices[name].items():
                if ending not in config.format.ignored:
                    param = getattr(layer, f"{matrix}_{ending}")
                    param.weight_loader(param, x, f"{name}.{ending}", shard, expert)
    method.process_weights_after_loading(layer)
    parts = {
        name: [getattr(layer, f"{name}_{part}") for part in ("weight", "scales", "biases")] for name in method.packings
    }
    return [PackedWeight(*tensors, method.packings[name].bits).dequantize() for name, tensors in parts.items()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", READ)
def test_reads_experts(case: str, engine: str, adapters: dict[str, Any]) -> None:
    """No engine takes experts with act-order."""
    config, how = READ[case]
    if (engine, case) in UNKNOWN_TO:
        return
    torch.manual_seed(0)
    sizes = {"gate_proj": (WIDTH, K), "up_proj": (WIDTH, K), "down_proj": (K, WIDTH)}
    made = [{name: write(torch.randn(size), how) for name, size in sizes.items()} for _ in range(EXPERTS)]
    files = [{name: tensors for name, (tensors, _) in each.items()} for each in made]
    adapter = configured(engine, config, adapters)
    read = functools.partial(experts_of_engine, engine, adapters=adapters)
    if engine == "transformers":
        read = experts_of_transformers  # type: ignore[assignment]
    if how.is_ordered:
        with pytest.raises(ValueError, match=r"expected experts without act-order \(desc_act\)"):
            read(adapter, files)
        return
    exact = [{name: numbers for name, (_, numbers) in each.items()} for each in made]
    w13 = torch.stack([torch.cat([each[name] for name in PARTS]) for each in exact])
    for weight, expected in zip(read(adapter, files), (w13, torch.stack([x["down_proj"] for x in exact])), strict=True):
        error = (weight - expected).abs()
        assert (error <= 4 * torch.finfo(torch.float32).eps * expected.abs().amax(-1, keepdim=True)).all(), error.max()


W8 = {"num_bits": 8, "type": "int", "strategy": "token"}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "fp8 without blocks": ({"quant_method": "fp8"}, "fp8 of e4m3 with weight_block_size None"),
    "fp8 in other blocks": (FP8 | {"weight_block_size": [64, 128]}, r"fp8 of e4m3 with weight_block_size \[64, 128\]"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fp8 of e5m2"),
    "ModelOpt's FP4": (MODELOPT | {"quant_algo": "NVFP4"}, "ModelOpt's NVFP4$"),
    "ModelOpt's caches": (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "ModelOpt's FP8 with a quantised key-value cache"),
    "MXFP4 with activations": (
        MXFP4 | {"config_groups": {"0": {"weights": scheme(type="float", group_size=32), "input_activations": W8}}},
        "compressed-tensors' mxfp4-pack-quantized of 4-bit float weights by group with input_activations",
    ),
    "MXFP4 in groups of 64": (
        compressed_tensors(scheme(type="float", group_size=64), format="mxfp4-pack-quantized"),
        "compressed-tensors' mxfp4-pack-quantized of 4-bit float weights by group",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "AutoRound with activations": (AUTO_ROUND | {"act_bits": 8}, "AutoRound's int of 4 bits with activations of 8 "),
    "AutoRound's floats": (AUTO_ROUND | {"data_type": "mx_fp"}, "AutoRound's mx_fp of 4 bits"),
    "MLX without bits": ({"group_size": 32}, "MLX's configuration without bits$"),
    "MLX without a group size": ({"bits": 4}, "MLX's configuration without group_size$"),
    "no groups": (compressed_tensors(), "compressed-tensors without config_groups"),
    "groups of None": (compressed_tensors(config_groups=None), "compressed-tensors without config_groups"),
    "floats": (
        floats("group", group_size=64),
        "compressed-tensors' float-quantized of 8-bit float weights by group",
    ),
    "activations": (
        compressed_tensors(config_groups={"0": {"weights": scheme(), "input_activations": W8}}),
        "compressed-tensors' pack-quantized of 4-bit int weights by group with input_activations",
    ),
    "caches": (compressed_tensors(scheme(), kv_cache_scheme=W8), "compressed-tensors' .* with kv_cache_scheme"),
    "transforms": (compressed_tensors(scheme(), transform_config={"a": 1}), "compressed-tensors' .* with transform_c"),
    "sparsity": (
        compressed_tensors(scheme(), sparsity_config={"format": "sparse-24"}),
        "compressed-tensors' .* with sparsity_config",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (GPTQ | {"bits": 3}, "GPTQ with 3 bits in the format gptq"),
    "Marlin's layout": (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ with 4 bits in the format marlin"),
    "gemv": (AWQ | {"version": "gemv"}, "AWQ with 4 bits in version gemv with zero_point True"),
    "AWQ in 8 bits": (AWQ | {"bits": 8}, "AWQ with 8 bits in version gemm"),
    "AWQ without zero points": (AWQ | {"zero_point": False}, "AWQ with 4 bits in version gemm with zero_point False"),
    "AutoRound in 2 bits": (AUTO_ROUND | {"bits": 2}, "AutoRound's int of 2 bits with activations of 16 bits"),
    "AutoRound's other layout": (AUTO_ROUND | {"packing_format": "auto_round:a"}, "AutoRound's auto_round:a"),
    "MLX's other modes": (MLX | {"mode": "nvfp4"}, "MLX's mode nvfp4$"),
    "AutoRound's MXFP4": (AUTO_ROUND | {"packing_format": "auto_round:mx_fp4"}, "AutoRound's auto_round:mx_fp4$"),
    "2 bits": (compressed_tensors(scheme(), scheme(2)), "compressed-tensors with 2-bit int weights by group$"),
    "a scale for all": (compressed_tensors(scheme(strategy="tensor")), "compressed-tensors with 4-bit .* by tensor$"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", [*OTHERS, *REFUSED])
def test_refuses_configurations(case: str, engine: str, adapters: dict[str, Any]) -> None:
    """transformers leaves other formats to its own code, and SGLang has no method for MLX's files."""
    config, got = (OTHERS | REFUSED)[case]
    got = "mlx$" if engine == "sglang" and "quant_method" not in config else got
    if engine == "transformers" and case in OTHERS:
        assert configured(engine, config, adapters) is None
        return
    with pytest.raises(ValueError, match=f"^quantization: expected {re.escape(SUPPORTED)}, on mps, got {got}"):
        configured(engine, config, adapters)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {ending: x for ending, x in tensors.items() if ending != name}


def cut(name: str, dim: int, size: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensors[name].narrow(dim, 0, size)}


FAULTY: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "no scales": (
        "gptq",
        without("scales"),
        "expected the tensors qweight, scales, qzeros in the files, got no scales",
    ),
    "three quarters of the codes": (
        "gptq",
        cut("qweight", 0, 12),
        "expected weights of 4 or 8 bits on mps, got 3 bits",
    ),
    "scales of other blocks": (
        "fp8",
        lambda tensors: tensors | {"weight_scale_inv": torch.rand(3, 1)},
        r"expected a scale for each 128 x 128 weights, \[1, 1\], for each row, or for all, got \[3, 1\]",
    ),
    "exponents of other groups": (
        "mxfp4",
        cut("weight_scale", 1, 2),
        "expected MXFP4 of 4 bits in groups of 32, got 4 bits in groups of 64",
    ),
    "few zero points": ("awq", cut("qzeros", 0, 2), r"expected qzeros of shape \[4, 2\], got \[2, 2\]"),
    "groups of another size": (
        "compressed-tensors",
        cut("weight_scale", 1, 2),
        "expected a group size of 32, as the configuration says, got 64",
    ),
    "groups that do not divide the columns": (
        "compressed-tensors in 8 bits",
        cut("weight_scale", 1, 3),
        "expected a group size that is a multiple of 32 and divides 128 columns, got 42",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", FAULTY)
def test_refuses_shapes(case: str, engine: str, adapters: dict[str, Any]) -> None:
    name, change, error = FAULTY[case]
    config, how = READ[name]
    tensors = {part: change(write(torch.randn(N, K), how)[0]) for part in PARTS}
    adapter = configured(engine, config, adapters)
    with pytest.raises(ValueError, match=rf"^\S+(\.weight|\.gate_proj)(: \w+)?: {error}$"):
        if engine == "transformers":
            read_by_transformers(adapter, tensors)
        else:
            read_by_engine(engine, adapter, tensors, adapters)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_refuses_exponents_of_nan(engine: str, adapters: dict[str, Any]) -> None:
    """A group that no file fills has this exponent."""
    config, how = READ["mxfp4"]
    tensors = {part: write(torch.randn(N, K), how)[0] for part in PARTS}
    tensors["up_proj"]["weight_scale"][-1, -1] = 255
    adapter = configured(engine, config, adapters)
    with pytest.raises(ValueError, match=r"expected finite weight_scale for all groups, which the checkpoint lacks$"):
        read_by_engine(engine, adapter, tensors, adapters)


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize(
    "other, got",
    [("gptq, dynamic", "4 bits in groups of 32, 8 bits in groups of 32"), (None, r"unquantised \S+up_proj")],
    ids=["bits", "unquantised"],
)
def test_refuses_fused_layers_of_unlike_matrices(
    other: str | None, got: str, engine: str, adapters: dict[str, Any]
) -> None:
    """transformers has a layer for each matrix."""
    config, how = READ["gptq"]
    gate = write(torch.randn(N, K), how)[0]
    up = write(torch.randn(N, K), READ[other][1])[0] if other else {"weight": torch.randn(N, K)}
    adapter = configured(engine, config, adapters)
    error = f"^{LAYER}.gate_up_proj: expected matrices that are all quantised the same way, got {got}$"
    with pytest.raises(ValueError, match=error):
        read_by_engine(engine, adapter, dict(zip(PARTS, (gate, up), strict=True)), adapters)


def test_vllm_gets_the_gates_of_mlx_files_dequantised(adapters: dict[str, Any]) -> None:
    """vLLM makes most gates unquantised. Convolutions are turned, and norms are stored plus one."""
    how = READ["mlx, own bits"][1]
    tensors, numbers = write(torch.randn(N, K), how)
    files = {f"language_model.{LAYER}.gate.{ending}": x for ending, x in tensors.items()}
    files |= {f"{LAYER}.conv1d.weight": torch.randn(8, 4, 1), f"{LAYER}.input_layernorm.weight": torch.full((K,), 1.5)}
    config = configured("vllm", READ["mlx, own bits"][0], adapters)
    mlx_files = adapters["vllm"].mlx_files
    config.shapes = {mlx_files.name_of(name): tuple(x.shape) for name, x in files.items()}
    read = dict(mlx_files.tensors_of_models(files.items(), config, K))
    torch.testing.assert_close(read[f"{LAYER}.gate.weight"], numbers, rtol=1e-6, atol=1e-6)
    assert torch.equal(read[f"{LAYER}.conv1d.weight"], files[f"{LAYER}.conv1d.weight"].mT)
    assert torch.equal(read[f"{LAYER}.input_layernorm.weight"], torch.full((K,), 0.5))
    assert len(read) == 3
