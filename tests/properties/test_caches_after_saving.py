"""Tests what continues after a cache was saved and loaded, reset, cropped, copied or pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aura.test_aura_cache import aura_cache, model_of
from tests.helpers.errors import assert_same_bits
from tests.integrations.models import random_model
from torch_gdn.aura import KVCache
from torch_gdn.integrations.transformers.aura import AuraCache
from torch_gdn.integrations.transformers.aura_layers import AuraLayer
from torch_gdn.integrations.transformers.conversation import ConversationCache
from torch_gdn.integrations.transformers.versions import with_cache


def saved(cache: Any, folder: Path) -> Path:
    cache.save(folder / "cache")
    return folder / "cache"


WAYS: dict[str, Callable[[KVCache, Path], KVCache]] = {
    "file": lambda cache, folder: KVCache.load(saved(cache, folder), cache.device, capacity=60),
    "copy": lambda cache, folder: copy.deepcopy(cache),
    "pickle": lambda cache, folder: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_codes(device: torch.device, tmp_path: Path, way: str) -> None:
    """The cache has no token, a full tail, or was cropped into the codes or the sinks. Then it and its copy continue
    with the same bits and share nothing: tokens become codes, the cache is cropped, and its rows change places.
    """
    k, v = torch.randn(2, 2, 2, 60, 64).to(device)
    q = torch.randn(2, 4, 3, 64).to(device)
    for tokens, kept in ((0, 0), (1, 1), (9, 9), (30, 30), (30, 12), (30, 1)):
        cache = KVCache("4v3", 2, 2, 64, 60, device, torch.float32, seed=5, tail=3, sinks=2)
        cache.append(k[:, :, :tokens], v[:, :, :tokens])
        cache.crop(kept)
        other = WAYS[way](cache, tmp_path)
        for name in ("length", "coded", "capacity", "seed", "tail", "sinks"):
            assert getattr(other, name) == getattr(cache, name)
        before = cache.attend(q)
        for each in (other, cache):
            end = len(each)
            for more in (1, 4, 1, 13):
                each.append(k[:, :, end : end + more], v[:, :, end : end + more])
                end += more
            each.crop(-2)
            each.reorder(torch.tensor([1, 0], device=device))
            each.append(k[:, :, :5], v[:, :, :5])
            if each is other:
                assert_same_bits("the first cache", cache.attend(q), before)
        assert_same_bits("o", other.attend(q), cache.attend(q))
        assert other.bytes_used == cache.bytes_used


@torch.no_grad()
def next_logits(model: Any, cache: Any, *lengths: int) -> Tensor:
    """Runs the model on `lengths` more tokens at a time. A token depends on its position alone."""
    result = []
    for length in lengths:
        seen = cache.get_seq_length()
        tokens = 1 + torch.arange(seen, seen + length).view(1, -1) * 7 % 60
        result.append(model(tokens, **with_cache(cache)).logits)
    return torch.cat(result, 1)


@pytest.mark.parametrize("kind", ["window", "qwen3_next"])
def test_a_models_cache(kind: str, tmp_path: Path) -> None:
    """A copy, a loaded file and a pickled cache continue like the cache, past the window and a tile. After a reset,
    each behaves like a new one.
    """
    model = model_of(kind)
    cache = aura_cache(model, "8v4")
    first = next_logits(model, cache, 7, 1, 2)
    others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    others.append(AuraCache.load(saved(cache, tmp_path), model.config))
    expected = next_logits(model, cache, 1, 3, 1, 1, 5)
    for other in others:
        assert_same_bits("logits", next_logits(model, other, 1, 3, 1, 1, 5), expected)
        assert other.bytes_used == cache.bytes_used
    for each in (cache, *others):
        each.reset()
        assert all(layer.get_seq_length() == 0 for layer in each.layers if isinstance(layer, AuraLayer))
        assert_same_bits("logits after reset()", next_logits(model, each, 7, 1, 2), first)


def test_a_copy_follows_the_models_attention() -> None:
    """The attention of a model may change between a copy of its cache and the next token."""
    model = model_of("qwen3")
    cache = aura_cache(model, "8v4")
    next_logits(model, cache, 9)
    other = copy.deepcopy(cache)
    model.set_attn_implementation("sdpa")
    assert_same_bits("logits", next_logits(model, other, 1, 1), next_logits(model, cache, 1, 1))


def test_a_file_that_is_refused_leaves_the_conversations(tmp_path: Path) -> None:
    model = random_model("qwen3_next")
    prompt = 1 + torch.arange(70)[None] % 30
    conversations = ConversationCache(model, max_bytes=2**24)
    conversations.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
    aura_cache(model_of("qwen3"), "8v4").save(tmp_path / "another")
    with pytest.raises(ValueError, match="load: path: expected a file of"):
        conversations.load(tmp_path / "another")
    conversations.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert conversations.last.reused == 69
