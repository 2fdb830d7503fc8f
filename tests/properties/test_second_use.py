"""Tests what a second use meets: an earlier call, another request of the same step, a user's setting, a loaded file."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.devices import DEVICES, ready
from tests.helpers.errors import assert_same_bits
from tests.integrations.models import random_model, random_tokens
from torch_gdn.integrations.draining import Drain
from torch_gdn.integrations.transformers import __main__ as transformers_serve
from torch_gdn.integrations.transformers.conversation import ConversationCache
from torch_gdn.integrations.transformers.prefix_states import PrefixStates, Taken
from torch_gdn.integrations.transformers.state_pool import StatePool, StateSizes
from torch_gdn.tools import serve
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import tensors_of, to_device
from torch_gdn_engines.sglang import tracking
from torch_gdn_engines.vllm import serve as vllm_serve

SIZES = StateSizes(state=(2, 4, 3), columns=(22, 3), dtype=torch.bfloat16)


@pytest.mark.parametrize("op", REGISTRY)
def test_a_second_call_has_the_bits_of_the_first(op: str) -> None:
    """Between them runs a call with other inputs. No call changes an input that it does not write."""
    entry = REGISTRY[op]
    call, other = entry.smallest(), entry.call(entry.small, seed=1)
    for device in map(ready, DEVICES):
        first, second = to_device(call, device), to_device(call, device)
        expected = entry.outputs(first, entry.run(first))
        between = to_device(other, device)
        entry.run(between)
        for name, x in entry.outputs(second, entry.run(second)).items():
            assert_same_bits(name, x, expected[name])
        for name in set(tensors_of(call)) - set(entry.written):
            assert_same_bits(f"input {name}", second[name], call[name])


@pytest.mark.parametrize("slots", [*itertools.product((True, False), repeat=2)], ids=str)
def test_two_requests_of_a_step_that_keep_the_states_of_one_page(slots: tuple[bool, bool]) -> None:
    """Their prompts share a page, so that both states have one name. The pool keeps one and loses no slot, whether
    a state was stored within the step or is copied after it.
    """
    pool = StatePool([0], SIZES, 8, torch.device("cpu"))
    hashes = SimpleNamespace(block_to_hash={5: 77, 6: 77})
    pages = SimpleNamespace(tokens_per_page=64, block_table={"a": [5], "b": [6]}, ledger=hashes)
    prefixes = PrefixStates(pool, pages)
    for request, has_slot in zip("ab", slots, strict=True):
        pool.hold(request)
        prefixes.pending[request] = [Taken(64, pool.take() if has_slot else None)]
    for request in "ab":
        prefixes.after(request)
    assert list(pool.slot_with) == [77] and pool.name_of == {slot: name for name, slot in pool.slot_with.items()}
    assert sorted([*pool.free, *pool.slot_of.values()]) == list(range(8))
    for _ in range(6):
        pool.take()
    assert (pool.slot_with, pool.name_of) == ({}, {})


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tracking_in_a_pool_that_is_a_view(device: torch.device, offset: int) -> None:
    """SGLang's pool may be part of a larger tensor, in layers and in slots. What is around it stays as it is."""
    for shape in ((2, 6, 5, 3), (2, 6, 4, 6)):
        whole = torch.randn(shape[0] + offset, shape[1] + offset, *shape[2:])
        expected = whole.clone()
        expected[offset:, offset:][:, 4] = whole[offset:, offset:][:, 1]
        on_device = whole.to(device)
        pool, other = on_device[offset:, offset:], torch.zeros(2, 6, 4, device=device)
        indices = [torch.tensor([n], device=device) for n in (1, 4)]
        mask = torch.tensor([True], device=device)
        tracking.track_all_layers(pool, other, indices[0], mask, indices[1], batch_size=1)
        assert_same_bits("pool", on_device, expected)
        tracking.track_one_layer(pool[1], other[1], indices[1], mask, indices[0] * 0 + 5, batch_size=1)
        expected[offset:, offset:][1, 5] = expected[offset:, offset:][1, 4]
        assert_same_bits("pool", on_device, expected)


VARIABLES = {"vllm": "TORCH_GDN_VLLM", "sglang": "TORCH_GDN_SGLANG"}


@pytest.mark.parametrize("engine", VARIABLES)
@pytest.mark.parametrize("value", ["cpu", "auto", "off", None])
def test_serve_leaves_a_variable_that_is_set(engine: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets an unset variable to mps, and no other."""
    monkeypatch.setattr(sys, "argv", ["serve"])
    monkeypatch.setattr(Drain, "install", lambda drain: None)
    monkeypatch.setenv(VARIABLES[engine], "")
    monkeypatch.delenv(VARIABLES[engine])
    if value is not None:
        monkeypatch.setenv(VARIABLES[engine], value)
    monkeypatch.setattr(serve, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(serve, "why_no_mps", lambda: "")
    monkeypatch.setattr(vllm_serve, "why_no_mps", lambda: "")
    monkeypatch.setattr(serve.runpy, "run_module", lambda *_, **__: None)
    monkeypatch.setattr(vllm_serve, "serve", lambda arguments: None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())  # type: ignore[arg-type]
    before = dict(os.environ)
    serve.main(["--engine", engine, "model"])
    assert dict(os.environ) == before | {VARIABLES[engine]: value or "mps"}


@pytest.mark.parametrize("given", [["--attn-implementation", "eager"], ["--attn-implementation=eager"], []], ids=str)
def test_serve_leaves_an_argument_that_is_given(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(Drain, "install", lambda drain: None)
    monkeypatch.setattr(transformers_serve, "main", lambda drafts: None)
    serve.main(["--engine", "transformers", "model", *given])
    assert sys.argv[4:] == (given or ["--attn-implementation", "sdpa"])


def answered(conversations: ConversationCache, prompt: torch.Tensor) -> int:
    """Returns how many tokens of the prompt were known."""
    conversations.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    return conversations.last.reused


def test_the_order_of_use_goes_on_after_conversations_are_loaded(tmp_path: Path) -> None:
    """What is used after loading is more recent than all that was saved, and the rest keeps its order."""
    model: Any = random_model("qwen3_5")
    prompts = [random_tokens(1, 20, seed=n) for n in range(6)]
    saved = ConversationCache(model, 2**30)
    for n in (0, 1, 2, 3, 0, 2):
        answered(saved, prompts[n])
    saved.save(tmp_path / "conversations")
    loaded = ConversationCache(model, saved.nbytes)
    loaded.load(tmp_path / "conversations")

    def known() -> list[int]:
        stems = [node.tokens for node in loaded.root.children]
        return [n for n, prompt in enumerate(prompts) if prompt[0, :-1].tolist() in stems]

    assert answered(loaded, prompts[1]) == 19
    for added, expected in ((4, [0, 1, 2, 4]), (5, [1, 2, 4, 5])):  # 3 was used least recently, then 0
        assert answered(loaded, prompts[added]) == 0
        assert known() == expected
