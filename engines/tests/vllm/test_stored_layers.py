"""The files of a checkpoint say which layers are packed and how, by the names that vLLM's model has for them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torch_gdn_engines.vllm import quantized, stored_layers

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


def of_gptq(name: str, rows: int, columns: int, bits: int = 4, group: int = 128) -> dict[str, tuple[int, ...]]:
    groups = columns // group
    zeros = rows * bits // 32
    shapes = {"qweight": (columns * bits // 32, rows), "qzeros": (groups, zeros), "scales": (groups, rows)}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def configuration(written: dict[str, Any], shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a Qwen3.5 that sees, whose files have tensors of these shapes."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration as Model

    headers = {name: {"shape": list(shape)} for name, shape in shapes.items()} | {"__metadata__": {"format": "pt"}}
    monkeypatch.setattr(stored_layers, "get_safetensors_params_metadata", lambda *_, **options: headers)
    config = quantized.CONFIGURATIONS[written["quant_method"]].from_config(written)
    config.maybe_update_config("a model")
    config.apply_vllm_mapper(Model.hf_to_vllm_mapper.get_rename_mapper())
    config.packed_modules_mapping = Model.packed_modules_mapping
    return config


def method_of(config: Any, kind: type, name: str) -> Any:
    method = config.get_quant_method(object.__new__(kind), name)
    return getattr(method, "packing", type(method).__name__ if method is not None else None)


def test_the_files_decide_whatever_names_the_configuration_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits and groups are those of the shapes, as `dynamic` or AutoRound's `extra_config` may set them by layer."""
    shapes = of_gptq("lm_head", 256, 128) | {"model.visual.blocks.0.attn.qkv.weight": (96, 32)}
    shapes |= of_gptq(f"{LAYER}.mlp.down_proj", 64, 256, bits=8, group=32) | {f"{LAYER}.mlp.up_proj.weight": (8, 8)}
    shapes |= {f"{LAYER}.mlp.gate_proj.weight": (8, 8), f"{LAYER}.mlp.down_proj.g_idx": (256,)}
    for part in "qkv":
        shapes |= of_gptq(f"{LAYER}.self_attn.{part}_proj", 64, 256)
    config = configuration(GPTQ | {"dynamic": {r"-:.*self_attn.*": {}}, "lm_head": False}, shapes, monkeypatch)
    ours = "language_model.model.layers.3"
    packings = {
        ("language_model.lm_head", ParallelLMHead): (4, -1, False),
        (f"{ours}.mlp.down_proj", ReplicatedLinear): (8, 32, True),
        (f"{ours}.self_attn.qkv_proj", QKVParallelLinear): (4, 128, False),
    }
    for (name, kind), expected in packings.items():
        found = method_of(config, kind, name)
        assert (found.bits, found.group_size, found.is_ordered) == expected, name
    for name in (
        f"{ours}.mlp.gate_up_proj",
        "visual.blocks.0.attn.qkv",
        "language_model.model.layers.33.mlp.down_proj",
    ):
        assert method_of(config, LinearBase, name) == "UnquantizedLinearMethod", name


@pytest.mark.parametrize(
    "change, error",
    [
        ({"v_proj.qweight": None}, "qkv_proj: expected matrices that are all quantised the same way, got"),
        ({"v_proj.qzeros": None}, "v_proj: expected the tensors qweight, qzeros, scales in the files, got no qzeros"),
        ({"v_proj.qzeros": (2, 6)}, "v_proj: expected weights of 4 or 8 bits on mps, got 3 bits"),
        ({"v_proj.scales": (8, 64)}, "qkv_proj: expected matrices that are all quantised the same way, got"),
    ],
)
def test_layers_that_the_files_lack_in_part_are_refused(
    change: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: dict[str, Any] = {}
    for part in "qkv":
        shapes |= of_gptq(f"{LAYER}.self_attn.{part}_proj", 64, 256)
    shapes |= {f"{LAYER}.self_attn.{name}": shape for name, shape in change.items()}
    config = configuration(GPTQ, {name: shape for name, shape in shapes.items() if shape}, monkeypatch)
    with pytest.raises(ValueError, match=rf"^language_model\.model\.layers\.3\.self_attn\.{error}"):
        method_of(config, QKVParallelLinear, "language_model.model.layers.3.self_attn.qkv_proj")


def test_compressed_tensors_lists_may_not_contradict_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that a list forgot is plain if its files are. One that a list protects cannot be packed."""
    shapes = {f"{LAYER}.mlp.down_proj.weight_packed": (64, 32), f"{LAYER}.linear_attn.out_proj.weight": (64, 64)}
    ours = "language_model.model.layers.3"
    config = configuration(COMPRESSED, shapes, monkeypatch)
    assert method_of(config, ReplicatedLinear, f"{ours}.mlp.down_proj").group_size == 64
    assert method_of(config, ReplicatedLinear, f"{ours}.linear_attn.out_proj") == "UnquantizedLinearMethod"
    ordered = shapes | {f"{LAYER}.mlp.down_proj.weight_g_idx": (256,)}
    with pytest.raises(ValueError, match=r"got .*mlp\.down_proj in compressed-tensors with act-order \(weight_g_idx\)"):
        method_of(configuration(COMPRESSED, ordered, monkeypatch), ReplicatedLinear, f"{ours}.mlp.down_proj")
    config = configuration(COMPRESSED | {"ignore": [f"{LAYER}.mlp.down_proj"]}, shapes, monkeypatch)
    with pytest.raises(
        ValueError, match=r"down_proj: expected a layer of config_groups, because the files have it packed"
    ):
        method_of(config, ReplicatedLinear, f"{ours}.mlp.down_proj")
