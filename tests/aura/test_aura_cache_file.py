"""Tests that saving and loading an AuraCache keeps all bits, and that errors name what does not fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from tests.aura.test_aura_cache import COMMON, PADDED, PROMPT, aura_cache, model_of
from tests.helpers.devices import ready
from tests.helpers.errors import relative_error
from torch_gdn.integrations.transformers import aura_file
from torch_gdn.integrations.transformers.aura import AuraCache
from torch_gdn.integrations.transformers.versions import with_cache


def skip_where_states_are_not_saved(kind: str) -> None:
    import transformers

    if kind == "qwen3_next" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 16):
        pytest.skip("states are saved since transformers 5.16")


@torch.no_grad()
def logits(model: Any, cache: Any, first: int, last: int) -> Tensor:
    seen = PADDED[:, :last].to(model.device)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, first:last]
    tokens = PROMPT[:, first:last].to(model.device)
    return model(tokens, attention_mask=seen, position_ids=positions, **with_cache(cache)).logits


def held(model: Any) -> AuraCache:
    cache = aura_cache(model, "8v4t")
    logits(model, cache, 0, 8)
    return cache


@pytest.mark.parametrize("kind", ["qwen3", "window", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("device_name", ["cpu", "mps"])
def test_round_trip(kind: str, device_name: str, tmp_path: Path) -> None:
    skip_where_states_are_not_saved(kind)
    model = model_of(kind).to(ready(device_name))
    cache = held(model)
    cache.save(tmp_path / "a")
    loaded = AuraCache.load(tmp_path / "a", model.config, device_name)
    loaded.save(tmp_path / "b")
    first, second = (aura_file.read(tmp_path / name) for name in "ab")
    assert second.layers == first.layers
    assert second.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(second.tensors[name], x) for name, x in first.tensors.items())
    assert loaded.get_seq_length() == 8
    for start, end in ((8, 10), (10, 11)):
        assert torch.equal(logits(model, loaded, start, end), logits(model, cache, start, end))


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    """As Gemma 4's, whose layers of full attention have longer heads than those of sliding windows."""
    sizes = ((2, 64), (1, 128))  # heads of keys, and their values
    second = {"num_key_value_heads": 1, "head_dim": 128}
    config = Qwen3Config(**COMMON, num_hidden_layers=2, per_layer_config={1: second})
    if getattr(config, "per_layer_config", None) in (None, {1: second}):
        pytest.skip("layers may differ since transformers 5.23")
    cache = AuraCache(config)
    for index, (heads, size) in enumerate(sizes):
        x = torch.randn(1, heads, 5, size)
        cache.update(x, x, index)
    cache.save(tmp_path / "a")
    loaded = AuraCache.load(tmp_path / "a", config)
    for layer, before, (heads, size) in zip(loaded.layers, cache.layers, sizes, strict=True):
        keys = layer.cache.decoded(torch.float32)[0]
        assert keys.shape == (1, heads, 5, size) and torch.equal(keys, before.cache.decoded(torch.float32)[0])


def test_a_long_conversation(tmp_path: Path) -> None:
    """The keys have means. Attention to codes equals attention to the decoded codes, also in a loaded cache."""
    model, tokens, result = model_of("qwen3"), torch.randint(1, 50, (2, 430)), []
    for implementation in ("aura", "sdpa"):
        model.set_attn_implementation(implementation)
        cache = AuraCache(model.config)
        with torch.no_grad():
            model(tokens[:, :400], **with_cache(cache))
            cache.save(tmp_path / "a")
            loaded = AuraCache.load(tmp_path / "a", model.config)
            result += [model(tokens[:, 400:], **with_cache(each)).logits for each in (cache, loaded)]
        assert loaded.layers[0].cache.keys.tile_means.any()
    assert torch.equal(result[0], result[1]) and torch.equal(result[2], result[3])
    assert relative_error(result[0], result[2]) < 1e-3  # a code may round the other way


def test_scheme_and_capacity(tmp_path: Path) -> None:
    model = model_of("qwen3")
    model.set_attn_implementation("aura")
    cache = AuraCache(model.config, "4v2t", capacity=9, tail=2, sinks=3)
    logits(model, cache, 0, 8)
    cache.save(tmp_path / "a")
    loaded = AuraCache.load(tmp_path / "a", model.config, capacity=20)
    assert loaded.layers[0].options == cache.layers[0].options
    assert loaded.layers[0].cache.scheme == cache.layers[0].cache.scheme
    assert loaded.layers[0].cache.capacity == 20
    assert AuraCache.load(tmp_path / "a", model.config, capacity=1).layers[0].cache.capacity == 8


def test_an_empty_cache(tmp_path: Path) -> None:
    model = model_of("window")
    cache = aura_cache(model, "2v2")
    cache.save(tmp_path / "a")
    loaded = AuraCache.load(tmp_path / "a", model.config)
    assert loaded.get_seq_length() == 0
    assert loaded.layers[0].options == cache.layers[0].options and loaded.layers[1].options.sinks == 0


def changed(path: Path, **metadata: str | None) -> Path:
    """Replaces metadata of the file. None removes an entry."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        about = file.metadata() | metadata
    save_file(load_file(path), path, {name: value for name, value in about.items() if value is not None})
    return path


def test_a_file_of_version_1(tmp_path: Path) -> None:
    """Such files were written before there were tails and sinks. All tokens are codes, and norms are float32."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model = model_of("qwen3")
    cache = aura_cache(model, "8v4", tail=0, sinks=0)
    logits(model, cache, 0, 8)
    cache.save(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        about = {name: text for name, text in file.metadata().items() if name not in ("tail", "sinks")}
    parts = {name: x.float() if name.endswith("norms") else x for name, x in load_file(tmp_path / "a").items()}
    save_file(parts, tmp_path / "a", about | {"version": "1"})
    loaded = AuraCache.load(tmp_path / "a", model.config)
    assert torch.equal(logits(model, loaded, 8, 11), logits(model, cache, 8, 11))


def without(path: Path, name: str) -> Path:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file({key: x for key, x in load_file(path).items() if key != name}, path, about)
    return path


def test_another_model_is_refused(tmp_path: Path) -> None:
    held(model_of("qwen3")).save(tmp_path / "a")
    with pytest.raises(
        ValueError, match="layer 1: load: path: expected codes, window 4, as the model has, got 'codes'"
    ):
        AuraCache.load(tmp_path / "a", model_of("window").config)
    with pytest.raises(ValueError, match="expected 4 layers, as the model has, got 2"):
        AuraCache.load(tmp_path / "a", model_of("qwen3_next").config)
    config = model_of("qwen3").config
    config.num_key_value_heads = 4
    with pytest.raises(
        ValueError,
        match="layer 0: load: path: expected 4 heads of keys of size 64, as the model has, got '2 of size 64'",
    ):
        AuraCache.load(tmp_path / "a", config)


def test_another_file_is_refused(tmp_path: Path) -> None:
    model = model_of("qwen3")
    cache = held(model)
    cache.layers[0].cache.save(tmp_path / "one layer")
    with pytest.raises(
        ValueError, match=r"expected format 'torch_gdn.aura.cache' version '1' or '2' or '3', got 'torch_gdn.aura'"
    ):
        AuraCache.load(tmp_path / "one layer", model.config)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="path: expected a safetensors file"):
        AuraCache.load(tmp_path / "text", model.config)
    cache.save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"or '3', got 'torch_gdn\.aura\.cache' version '4'"):
        AuraCache.load(changed(tmp_path / "a", version="4"), model.config)


@pytest.mark.parametrize("layers", [None, "no JSON"])
def test_a_file_without_its_layers_is_refused(layers: str | None, tmp_path: Path) -> None:
    model = model_of("qwen3")
    held(model).save(tmp_path / "a")
    with pytest.raises(ValueError, match=f"expected a list of layers, got {layers!r}"):
        AuraCache.load(changed(tmp_path / "a", layers=layers), model.config)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "qwen3",
            "1.value.codes",
            r"layer 1: load: path: expected value.codes of shape \[2, 2, 5, 8\], int32, got None",
        ),
        (
            "qwen3",
            "0.exact.values",
            r"layer 0: load: path: expected exact.values of shape \[2, 2, 3, 64\], float32, got None",
        ),
        ("qwen3", "0.key.signs", r"layer 0: load: path: expected key.signs of shape \[D\], got None"),
        ("qwen3_next", "0.state", r"layer 0: load: path: expected columns and state, got \['columns'\]"),
    ],
)
def test_a_part_that_is_missing_is_named(kind: str, name: str, message: str, tmp_path: Path) -> None:
    skip_where_states_are_not_saved(kind)
    model = model_of(kind)
    held(model).save(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        AuraCache.load(without(tmp_path / "a", name), model.config)


def test_the_format_is_in_the_file(tmp_path: Path) -> None:
    model = model_of("window")
    held(model).save(tmp_path / "a")
    content = aura_file.read(tmp_path / "a")
    assert [layer["kind"] for layer in content.layers] == ["codes", "codes, window 4"]
    assert content.layer_tensors(1)["key.norms"].shape == (2, 2, 6)
    assert content.layer_tensors(1)["exact.keys"].shape == (2, 2, 2, 64)
