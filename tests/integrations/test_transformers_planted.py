"""Plants changes into the installed transformers, as a version after it may have them.

Each ends with the tokens of transformers' own code, and with a warning or a class that status() names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import ready
from tests.integrations.models import random_model, random_tokens
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import comparison, in_place, patches, small_models, switch, versions
from torch_gdn.self_test import verdicts

KIND = "qwen3_next"
NEWER = "5.99.0"
Plant = Callable[[Callable[[str], str]], ModuleType]
pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.skipif(
        versions.minor(versions.installed()) < (5, 23), reason="the changes are planted into the text of later versions"
    ),
]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Enables only one model, and keeps its verdicts in a folder of the test."""
    monkeypatch.setattr(switch, "MODELS", (KIND,))
    monkeypatch.setattr(switch, "KDA_MODELS", ())
    monkeypatch.setattr(switch, "CONVOLVING_MODELS", ())
    monkeypatch.setattr(verdicts, "path", lambda key: tmp_path / "verdicts.json")
    transformers.disable()
    with torch.no_grad():
        yield
    transformers.disable()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Returns a function that changes the text of the model's module, and puts the result in its place."""
    module = patches.modeling_module(KIND)
    assert module is not None

    def planted(change: Callable[[str], str]) -> ModuleType:
        text = inspect.getsource(module)
        changed = change(text)
        assert changed != text
        result = ModuleType(module.__name__)
        vars(result).update({"__package__": module.__package__, "__file__": module.__file__})
        monkeypatch.setitem(sys.modules, module.__name__, result)
        monkeypatch.setattr(sys.modules[module.__package__ or ""], module.__name__.rpartition(".")[2], result)
        exec(compile(changed, str(module.__file__), "exec"), vars(result))
        return result

    return planted


def tokens_of(model: Any) -> Tensor:
    device = model.device
    prompt = random_tokens(2, 9).to(device)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    result: Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return result.cpu()


def compared() -> tuple[Tensor, Tensor]:
    """Returns the tokens of transformers' own code on the CPU, and those with torch_gdn on mps."""
    device = ready("mps")
    model = random_model(KIND)
    expected = tokens_of(model)
    transformers.enable()
    return tokens_of(model.to(device)), expected


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    return text


def with_another_name_of_the_cache(text: str) -> str:
    """Renames the argument in layers, as 5.24 did. The model hands it on."""
    layers, start, model = text.partition(f"class {KIND.title().replace('_', '')}PreTrainedModel(")
    own = versions.CACHE_NAMES
    layers = re.sub(rf"\b({own.model}|{own.delta_net})\b", "kept_states", layers)
    assert f"{own.model}={own.model}" in model
    head, call, rest = model.partition("decoder_layer(\n")
    return layers + start + head + call + rest.replace(f"{own.model}={own.model}", f"kept_states={own.model}", 1)


def test_another_name_of_the_cache(plant: Plant) -> None:
    plant(with_another_name_of_the_cache)
    result, expected = compared()
    assert torch.equal(result, expected)
    assert {"Qwen3NextAttention", "Qwen3NextDecoderLayer"} <= set(transformers.status().unknown[KIND])


def test_another_name_of_the_cache_in_a_class_that_was_taken(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the trial takes the class, a call with an unknown argument goes to transformers."""
    from torch_gdn.integrations.transformers import attention, decoder_layers

    plant(with_another_name_of_the_cache)
    monkeypatch.setattr(attention, "is_known", lambda owner: True)
    monkeypatch.setattr(decoder_layers, "is_known", lambda owner, norm: True)
    with pytest.warns(UserWarning, match="torch_gdn does not know its argument kept_states"):
        result, expected = compared()
    assert torch.equal(result, expected)
    fallbacks = transformers.status().fallbacks
    assert fallbacks.keys() == {"decoder_layer", "attention"}
    assert sum(fallbacks["decoder_layer"].values()) == 2 * sum(fallbacks["attention"].values()) == 10


def test_an_argument_with_another_meaning(plant: Plant) -> None:
    """The pair of tables changes places in all functions that use it."""
    plant(
        lambda text: replaced(
            text,
            (r"cos, sin = position_embeddings", "sin, cos = position_embeddings"),
            (r"return cos\.to\(dtype=x\.dtype\), sin\.to\(dtype=x\.dtype\)", "return sin.to(x.dtype), cos.to(x.dtype)"),
        )
    )
    result, expected = compared()
    assert torch.equal(result, expected)
    status = transformers.status()
    assert "Qwen3NextAttention" in status.unknown[KIND] and "attention" not in status.ran


def test_a_layer_with_one_more_output(plant: Plant) -> None:
    def change(text: str) -> str:
        layer, start, model = text.partition(f"class {KIND.title().replace('_', '')}PreTrainedModel(")
        head, end, _ = layer.rpartition("        return hidden_states\n")
        model = replaced(model, (r"hidden_states = decoder_layer\(", "hidden_states, _ = decoder_layer("))
        return head + end.replace("hidden_states", "hidden_states, None") + start + model

    plant(change)
    result, expected = compared()
    assert torch.equal(result, expected)
    assert "Qwen3NextDecoderLayer" in transformers.status().unknown[KIND]


def test_a_cache_whose_update_returns_more(plant: Plant) -> None:
    def change(text: str) -> str:
        kind = (
            "class ThirdCache(DynamicCache):\n"
            "    def update(self, *args, **kwargs):\n"
            "        return (*super().update(*args, **kwargs), 'more')\n\n\n"
        )
        return replaced(
            text,
            (r"key_states, value_states = (\w+)\.update", r"key_states, value_states, _ = \1.update"),
            (r"\bDynamicCache\(config", "ThirdCache(config"),
            (r"\nclass Qwen3NextRMSNormGated", f"\n{kind}class Qwen3NextRMSNormGated"),
            (r"\nclass Qwen3NextModel\(", "\nDynamicCache = ThirdCache\n\n\nclass Qwen3NextModel("),
        )

    module: Any = plant(change)
    device = ready("mps")
    model = random_model(KIND)
    prompt, options = random_tokens(2, 9), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}

    def generated() -> Tensor:
        cache = versions.with_cache(module.ThirdCache(config=model.config))
        result: Tensor = model.generate(prompt.to(model.device), **cache, **options)
        return result.cpu()

    expected = generated()
    transformers.enable()
    model.to(device)
    assert torch.equal(generated(), expected)
    assert "Qwen3NextAttention" in transformers.status().unknown[KIND]


def test_a_cache_that_holds_states_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the state without its sign. What is written in place would come back with the other one."""
    from transformers.cache_utils import LinearAttentionLayer

    update = LinearAttentionLayer.update_recurrent_state

    def negated(self: Any, recurrent_states: Tensor, *args: Any, **options: Any) -> Any:
        return update(self, -recurrent_states, *args, **options)

    cache_utils = importlib.import_module("transformers.cache_utils")
    read = cache_utils.Cache.get_recurrent_state

    def read_negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = read(self, *args, **kwargs)
        return None if result is None else -result

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", negated)
    monkeypatch.setattr(cache_utils.Cache, "get_recurrent_state", read_negated)
    monkeypatch.setattr(in_place, "ORIGINALS", in_place.originals())
    result, expected = compared()
    assert torch.equal(result, expected)
    assert "gdn_decode" not in transformers.status().ran


def test_a_small_model_leaves_the_random_numbers_as_they_are() -> None:
    ready("mps")
    before = torch.get_rng_state(), torch.mps.get_rng_state()
    weights = [small_models.make(KIND, seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(before[0], torch.get_rng_state()) and torch.equal(before[1], torch.mps.get_rng_state())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_newer_version_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "transformers_version", lambda: NEWER)
    device = ready("mps")
    model = random_model(KIND)
    expected = tokens_of(model)
    status = transformers.enable()
    assert KIND in status.replaced and f"transformers {NEWER} is not tested" in str(status)
    assert not status.ran  # what the comparison called is not counted
    assert torch.equal(tokens_of(model.to(device)), expected)
    assert transformers.status().ran["attention"] and not transformers.status().fallbacks
    transformers.disable()
    monkeypatch.setattr(comparison, "problem_of", lambda *_: "this is not asked again")
    assert KIND in transformers.enable().replaced


@pytest.mark.parametrize("version", [NEWER, "4.10.0"])
def test_a_model_of_another_version_that_differs_is_left(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The rule's g becomes a decay, and no longer its logarithm. No trial of a class sees that."""

    def change(text: str) -> str:
        text = replaced(text, (r"g = (-self\.A_log.*)\n", r"g = (\1).exp()\n"))
        return replaced(text, (r"decay = g  #", "decay = g.log()  #"))

    plant(change)
    monkeypatch.setattr(switch, "transformers_version", lambda: version)
    words = f"leaves {KIND} to transformers {version}, because the logits of Qwen3NextForCausalLM differ"
    with pytest.warns(UserWarning, match=words):
        result, expected = compared()
    assert torch.equal(result, expected)
    status = transformers.status()
    assert KIND not in status.replaced and "differ" in status.off[KIND]
    assert f"{KIND} is off: transformers {version} is not tested" in str(status)
    transformers.disable()
    monkeypatch.setattr(comparison, "problem_of", lambda *_: "")  # the verdict is kept
    with pytest.warns(UserWarning, match=words):
        transformers.enable()


def test_the_comparison_runs_what_runs_on_mps() -> None:
    """Otherwise it would prove nothing."""
    from torch_gdn.integrations.transformers import dispatch

    dispatch.reset_counts()
    module = patches.modeling_module(KIND)
    assert module is not None
    patches.learn(module)
    assert comparison.problem_of(KIND, list(patches.patches_of(module))) == ""
    assert set(dispatch.ran) == {
        "attention",
        "causal_conv1d_fn",
        "chunk_gated_delta_rule",
        "decoder_layer",
        "gdn_decode",
        "moe_block",
        "rms_norm",
        "rms_norm_gated",
    }
    dispatch.reset_counts()
