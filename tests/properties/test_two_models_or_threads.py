"""Tests two of a thing in one process: threads, models, caches, and features that are enabled in both orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.aura.test_aura_cache import aura_cache, model_of
from tests.helpers.errors import assert_same_bits
from tests.integrations.test_transformers_switch import differing, everything
from tests.properties.test_caches_after_saving import next_logits
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import switch
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device


@pytest.fixture
def switched_off() -> Iterator[None]:
    transformers.disable()
    yield
    transformers.disable()


def in_two_threads(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


def test_two_threads_that_run_every_op(device: torch.device) -> None:
    """Each thread runs all ops, in opposite orders and on its own inputs, and gets the bits of a single thread."""

    names = list(REGISTRY)
    calls = [{name: REGISTRY[name].call(REGISTRY[name].small, seed) for name in names} for seed in range(2)]

    def run(name: str, seed: int) -> dict[str, Any]:
        entry, call = REGISTRY[name], to_device(calls[seed][name], device)
        return {key: x.cpu() for key, x in entry.outputs(call, entry.run(call)).items()}

    expected = [{name: run(name, seed) for name in names} for seed in range(2)]
    result = in_two_threads(lambda seed: {name: run(name, seed) for name in (names, names[::-1])[seed]})
    for seed, name in ((seed, name) for seed in range(2) for name in names):
        for key, x in expected[seed][name].items():
            assert_same_bits(f"{name}: {key}", result[seed][name][key], x)


@pytest.mark.usefixtures("switched_off")
def test_two_threads_that_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting patches takes half a second. Meanwhile no other thread may collect, because it would see patched
    names.
    """
    before, real, collecting = everything(), switch.modules_of, threading.Lock()

    def slow(models: tuple[str, ...]) -> Any:
        if models is switch.MODELS:
            assert collecting.acquire(blocking=False)
            time.sleep(0.5)
            collecting.release()
        return real(models)

    monkeypatch.setattr(switch, "modules_of", slow)
    assert all(status.enabled for status in in_two_threads(lambda _: transformers.enable()))
    transformers.disable()
    assert differing(before, everything()) == set()


@pytest.mark.usefixtures("switched_off")
@pytest.mark.parametrize("first", ["rollback", "continuous_batching"])
def test_features_in_both_orders(first: str) -> None:
    """Enabling one after the other equals enabling both at once. disable() restores everything that both replaced."""
    before = everything()
    (second,) = {"rollback", "continuous_batching"} - {first}
    transformers.enable(**{first: True})
    transformers.enable(**{second: True})
    status = transformers.enable()
    assert {"rollback", "continuous batching"} <= set(status.replaced)
    transformers.disable()
    assert differing(before, everything()) == set()
    assert set(transformers.enable(**{second: True}).replaced) >= {second.replace("_", " ")}


def test_two_caches_of_two_models() -> None:
    """Two models, each with two caches, take steps in turn. The logits are those of each cache by itself."""
    models = [model_of("window"), model_of("qwen3")]
    expected = [next_logits(model, aura_cache(model, "8v4"), 6, 1, 3, 1, 2) for model in models]
    caches = [(model, aura_cache(model, "8v4")) for model in models for _ in range(2)]
    result: list[list[Any]] = [[] for _ in caches]
    for length in (6, 1, 3, 1, 2):
        for (model, cache), logits in zip(caches, result, strict=True):
            logits.append(next_logits(model, cache, length))
    for n, logits in enumerate(result):
        assert_same_bits("logits", torch.cat(logits, 1), expected[n // 2])
