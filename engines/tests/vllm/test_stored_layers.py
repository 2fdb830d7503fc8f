"""The files of a checkpoint say which layers are packed and how, by the names that vLLM's model has for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torch_gdn_engines.vllm import quantized, quantized_layers
from torch_gdn_engines.vllm.quantized_layers import PackedLinearMethod

LAYER = "model.language_model.layers.3"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": [],
    "config_groups": {
        "0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
        }
    },
}


def gptq_shapes(name: str, rows: int, columns: int, bits: int = 4, group: int = 128) -> dict[str, tuple[int, ...]]:
    groups = columns // group
    zeros = rows * bits // 32
    shapes = {"qweight": (columns * bits // 32, rows), "qzeros": (groups, zeros), "scales": (groups, rows)}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def configuration(written: dict[str, Any], shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a Qwen3.5 that sees, whose files have tensors of these shapes."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration as Model

    headers = {name: {"shape": list(shape)} for name, shape in shapes.items()} | {"__metadata__": {"format": "pt"}}
    monkeypatch.setattr(quantized_layers, "get_safetensors_params_metadata", lambda *_, **options: headers)
    config = quantized.CONFIGURATIONS[written["quant_method"]].from_config(written)
    config.maybe_update_config("a model")
    config.apply_vllm_mapper(Model.hf_to_vllm_mapper.get_rename_mapper())
    config.packed_modules_mapping = Model.packed_modules_mapping
    return config


def method_of(config: Any, kind: type, name: str, columns: int = 256) -> Any:
    """Returns how a layer with so many columns is packed, or the name of its method."""
    method = config.get_quant_method(object.__new__(kind), name)
    is_packed = isinstance(method, PackedLinearMethod)
    return method.packing_of(list(method.matrices), columns) if is_packed else type(method).__name__


def test_the_files_decide_whatever_names_the_configuration_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits and groups are those of the shapes, as `dynamic` or AutoRound's `extra_config` may set them by layer."""
    shapes = gptq_shapes("lm_head", 256, 128) | {"model.visual.blocks.0.attn.qkv.weight": (96, 32)}
    shapes |= gptq_shapes(f"{LAYER}.mlp.down_proj", 64, 256, bits=8, group=32) | {f"{LAYER}.mlp.up_proj.weight": (8, 8)}
    shapes |= {f"{LAYER}.mlp.gate_proj.weight": (8, 8), f"{LAYER}.mlp.down_proj.g_idx": (256,)}
    for part in "qkv":
        shapes |= gptq_shapes(f"{LAYER}.self_attn.{part}_proj", 64, 256)
    config = configuration(GPTQ | {"dynamic": {r"-:.*self_attn.*": {}}, "lm_head": False}, shapes, monkeypatch)
    ours = "language_model.model.layers.3"
    packings = {
        ("language_model.lm_head", ParallelLMHead, 128): (4, 128, False),
        (f"{ours}.mlp.down_proj", ReplicatedLinear, 256): (8, 32, True),
        (f"{ours}.self_attn.qkv_proj", QKVParallelLinear, 256): (4, 128, False),
    }
    for (name, kind, columns), expected in packings.items():
        packing = method_of(config, kind, name, columns)
        assert (packing.bits, packing.group_size, packing.is_ordered) == expected, name
    for name in (
        f"{ours}.mlp.gate_up_proj",
        "visual.blocks.0.attn.qkv",
        "language_model.model.layers.33.mlp.down_proj",
    ):
        assert method_of(config, LinearBase, name) == "UnquantizedLinearMethod", name


@pytest.mark.parametrize(
    "change, error",
    [
        (
            {"v_proj.qweight": None, "v_proj.qzeros": None, "v_proj.scales": None},
            "qkv_proj: expected matrices that are all quantised the same way, got unquantised .*v_proj",
        ),
        ({"v_proj.qweight": None}, "v_proj: expected the tensors qweight, scales, qzeros in the files, got no qweight"),
        ({"v_proj.scales": (8, 64), "v_proj.qzeros": (8, 8)}, "qkv_proj: .* got 4 bits in groups of 128, .* of 32"),
    ],
)
def test_layers_that_the_files_lack_in_part_are_refused(
    change: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: dict[str, Any] = {}
    for part in "qkv":
        shapes |= gptq_shapes(f"{LAYER}.self_attn.{part}_proj", 64, 256)
    shapes |= {f"{LAYER}.self_attn.{name}": shape for name, shape in change.items()}
    config = configuration(GPTQ, {name: shape for name, shape in shapes.items() if shape}, monkeypatch)
    with pytest.raises(ValueError, match=rf"^language_model\.model\.layers\.3\.self_attn\.{error}"):
        method_of(config, QKVParallelLinear, "language_model.model.layers.3.self_attn.qkv_proj")


def test_the_files_decide_whatever_the_lists_of_compressed_tensors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that a list forgot is plain if its files are, and one that a list protects is packed if they are."""
    shapes = {f"{LAYER}.mlp.down_proj.weight_packed": (64, 32), f"{LAYER}.mlp.down_proj.weight_scale": (64, 4)}
    shapes |= {f"{LAYER}.linear_attn.out_proj.weight": (64, 64)}
    ours = "language_model.model.layers.3"
    for ignore in ([], [f"{LAYER}.mlp.down_proj"]):
        config = configuration(COMPRESSED | {"ignore": ignore}, shapes, monkeypatch)
        assert method_of(config, ReplicatedLinear, f"{ours}.mlp.down_proj").group_size == 64
        assert method_of(config, ReplicatedLinear, f"{ours}.linear_attn.out_proj") == "UnquantizedLinearMethod"


def test_vllm_can_send_a_configuration_to_its_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in quantized.CONFIGURATIONS.values():
        assert pickle.loads(pickle.dumps(kind)) is kind
    for written in (GPTQ, COMPRESSED):
        config = configuration(written, gptq_shapes("lm_head", 256, 128), monkeypatch)
        sent = pickle.loads(pickle.dumps(config))
        assert (sent.shapes, type(sent.format)) == (config.shapes, type(config.format))
