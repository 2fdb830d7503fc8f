"""Tests prompts with a common prefix in continuous batching: the second prefills its own tokens and at most 64 more."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.devices import kernels_run, ready
from tests.integrations.models import SERVED_KINDS, distance, random_model, random_tokens
from tests.integrations.serving import (
    NEW_TOKENS,
    Passed,
    alone,
    assert_nothing_is_held,
    managed,
    other_version,
    results,
    served,
)
from torch_gdn.integrations import transformers

if reason := other_version("continuous batching"):
    pytest.skip(reason, allow_module_level=True)

from torch_gdn.integrations.transformers import continuous_batching
from torch_gdn.integrations.transformers.prefix_states import PrefixStates
from torch_gdn.integrations.transformers.state_pool import StatePool, StateSizes

SHARED = 200  # tokens: three times 64, and some more
PREFIX = random_tokens(SHARED, seed=7).tolist()
FIRST, SECOND = ([*PREFIX, *random_tokens(n, seed=n).tolist()] for n in (50, 30))
pytestmark = pytest.mark.usefixtures("serving")


@dataclass
class Turn:
    tokens: list[int]
    prefilled: int
    logits: torch.Tensor  # those that chose its tokens


def in_turn(model: Any, prompts: Sequence[list[int]], **options: Any) -> tuple[list[Turn], Any]:
    """Runs one prompt after the other through one manager. Returns the answers and its cache."""
    passed, turns = Passed(model), []
    with managed(model, **options) as manager:
        cache, given = manager.batch_processor.cache, results(manager)
        for prompt in prompts:
            passed.forget()
            manager.add_request(prompt)
            result = next(given)
            chosen_by = torch.cat(passed.logits)[-NEW_TOKENS:]
            turns.append(Turn(result.generated_tokens, passed.tokens - (NEW_TOKENS - 1), chosen_by))
    assert_nothing_is_held(cache)
    return turns, cache


@pytest.mark.sweep(4)
@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("kind", [kind for kind in SERVED_KINDS if kind != "lara_mini"])  # it has sliding windows
def test_the_second_prompt_prefills_its_own_tokens(kind: str, budget: int) -> None:
    model = random_model(kind)
    expected = alone(model, [FIRST, SECOND])
    transformers.enable(continuous_batching=True)
    (missed,), _ = in_turn(random_model(kind), [SECOND], allow_block_sharing=False, max_batch_tokens=budget)
    (first, second), _ = in_turn(model, [FIRST, SECOND], max_batch_tokens=budget)
    assert [first.tokens, second.tokens] == expected
    assert first.prefilled == len(FIRST)
    assert missed.prefilled == len(SECOND)
    assert second.prefilled == len(SECOND) - 192
    assert distance(second.logits, missed.logits) < 1e-6


@pytest.mark.sweep(4)
@pytest.mark.parametrize("length", [64, 65, 128, 129, 130])
def test_a_prompt_once_more(length: int) -> None:
    """At least its last token is prefilled, because its logits are needed."""
    model, prompt = random_model("qwen3_5"), random_tokens(length).tolist()
    transformers.enable(continuous_batching=True)
    (first, second), _ = in_turn(model, [prompt, prompt])
    assert second.tokens == first.tokens
    assert second.prefilled == length - (length - 1) // 64 * 64


def test_an_answer_is_part_of_the_next_prompt() -> None:
    model, prompt = random_model("qwen3_5"), random_tokens(60).tolist()
    transformers.enable(continuous_batching=True)
    told = [*prompt, *alone(model, [prompt])[0], *random_tokens(5, seed=2).tolist()]
    expected = alone(random_model("qwen3_5"), [told])
    (_, second), _ = in_turn(model, [prompt, told])
    assert second.tokens == expected[0]
    assert second.prefilled == len(told) - 64  # 4 of the 64 were generated


@pytest.mark.parametrize("slots", [5, 64])
def test_many_at_once(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of prompts end anywhere. If there are few slots, checkpoints give way to requests."""
    choose = random.Random(1)
    stems = [random_tokens(n, seed=n).tolist() for n in (70, 150, 260)]
    prompts = [[*choose.choice(stems)[: choose.randint(1, 260)], *random_tokens(9, seed=n).tolist()] for n in range(24)]
    expected = alone(random_model("qwen3_5"), prompts)
    transformers.enable(continuous_batching=True)
    monkeypatch.setattr(continuous_batching, "slots_and_share", lambda *_: (slots, 0.0))
    model = random_model("qwen3_5")
    passed = Passed(model)
    result = served(model, prompts)
    assert [result.tokens[f"request {n}"] for n in range(24)] == expected
    saved = sum(map(len, prompts)) + 24 * (NEW_TOKENS - 1) - passed.tokens
    assert saved >= (300 if slots == 64 else 0)
    assert_nothing_is_held(result.cache)


def test_cancelled_requests_leave_nothing() -> None:
    prompts = [FIRST, SECOND, PREFIX, FIRST[:100]]
    expected = alone(random_model("qwen3_5"), prompts)
    transformers.enable(continuous_batching=True)
    result = served(random_model("qwen3_5"), prompts, cancelled=(0, 2))
    assert result.tokens == {f"request {n}": expected[n] for n in (1, 3)}
    assert_nothing_is_held(result.cache)


def test_where_prompts_part_a_state_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt's checkpoints are far apart. The third prompt finds the one that the second left."""
    monkeypatch.setattr("torch_gdn.integrations.transformers.prefix_states.MOST", 1)
    model = random_model("qwen3_5")
    prompts = [[*PREFIX, *random_tokens(n, seed=n).tolist()] for n in (130, 100, 20)]
    expected = alone(random_model("qwen3_5"), prompts)
    transformers.enable(continuous_batching=True)
    turns, _ = in_turn(model, prompts)
    assert [turn.tokens for turn in turns] == expected
    assert [turn.prefilled for turn in turns] == [330, 300, 220 - 192]


def test_a_step_that_fails_gives_its_checkpoints_back() -> None:
    """transformers then ends its loop, and fails all requests."""
    model = random_model("qwen3_5")
    transformers.enable(continuous_batching=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("a step that fails")

    with managed(model, max_batch_tokens=512) as manager:
        cache = manager.batch_processor.cache
        model.lm_head.register_forward_pre_hook(fail)
        manager.add_request(FIRST)
        assert manager.get_result(timeout=60).error == "a step that fails"
    assert_nothing_is_held(cache)


def test_pages_that_are_gone_are_not_shared() -> None:
    model = random_model("qwen3_5")
    expected = alone(random_model("qwen3_5"), [SECOND])
    transformers.enable(continuous_batching=True)
    passed = Passed(model)
    with managed(model) as manager:
        cache, given = manager.batch_processor.cache, results(manager)
        manager.add_request(FIRST)
        next(given)
        with manager.pause():
            assert cache.evict_cached_blocks()
        passed.forget()
        manager.add_request(SECOND)
        assert next(given).generated_tokens == expected[0]
    assert passed.tokens == len(SECOND) + NEW_TOKENS - 1


def test_a_reset_forgets_the_states() -> None:
    transformers.enable(continuous_batching=True)
    _, cache = in_turn(random_model("qwen3_5"), [FIRST])
    assert cache.states.slot_with
    cache.reset()
    assert not cache.states.slot_with
    assert_nothing_is_held(cache)


def test_on_mps() -> None:
    prompts, device = [FIRST[:150], [*FIRST[:140], 1, 2, 3]], ready("mps")
    expected = alone(random_model("qwen3_next"), prompts)
    model = copy.deepcopy(random_model("qwen3_next")).to(device)
    transformers.enable(continuous_batching=True)
    with kernels_run(device, "causal_conv1d", "batch_copy"):
        (first, second), _ = in_turn(model, prompts, num_blocks=64, max_batch_tokens=512)
    assert [first.tokens, second.tokens] == expected
    assert second.prefilled == 143 - 128


CPU = torch.device("cpu")
SIZES = StateSizes(state=(2, 4, 3), columns=(22, 3), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("past", "prompt", "budget", "expected"),
    [
        (0, 30, 512, 30),  # no boundary
        (0, 100, 512, 100),  # passes one boundary, at which the rule stores the state
        (0, 250, 512, 128),  # up to the second boundary
        (128, 250, 512, 122),
        (0, 250, 100, 64),  # the budget cuts it at a multiple of 64
        (0, 250, 50, 50),
        (50, 250, 512, 14),  # starts between two boundaries, ends at the next
        (50, 250, 10, 10),
        (0, 2000, 512, 512),  # boundaries every 256; up to the second
        (0, 2000, 400, 384),
    ],
)
def test_parts_of_prompts_end_where_states_are_wanted(past: int, prompt: int, budget: int, expected: int) -> None:
    prefixes = PrefixStates(StatePool([0], SIZES, 16, CPU), SimpleNamespace(tokens_per_page=16))
    state = SimpleNamespace(request_id="a", position_offset=past, initial_tokens=[0] * prompt)
    assert prefixes.part(state, prompt - past, budget) == expected


def test_pages_longer_than_64_tokens() -> None:
    prefixes = PrefixStates(StatePool([0], SIZES, 16, CPU), SimpleNamespace(tokens_per_page=256))
    assert prefixes.boundaries("a", 1000, 0, 1000) == [256, 512, 768]
    few = PrefixStates(StatePool([0], SIZES, 4, CPU), SimpleNamespace(tokens_per_page=256))
    assert few.boundaries("a", 1000, 0, 1000) == [512, 768]  # at most half of the slots, with its last page


def test_named_states_are_taken_last_and_the_one_used_least_recently_first() -> None:
    pool = StatePool([0], SIZES, 4, CPU)
    for name in (10, 11, 12):
        slot = pool.take()
        pool.layers[0].states[slot] = name
        pool.keep(slot, name)
    pool.hold_copy("a", 10)
    assert pool.layers[0].states[pool.slot_of["a"]].unique().tolist() == [10]
    assert sorted(pool.slot_with) == [10, 11, 12]
    pool.hold("b")
    assert sorted(pool.slot_with) == [10, 12]
    pool.hold_copy("c", 12)  # takes the slot of 10, the only other free one
    assert sorted(pool.slot_with) == [12]
    pool.hold_copy("d", 12)  # keeps its own slot
    assert pool.layers[0].states[pool.slot_of["d"]].unique().tolist() == [12]
    assert (pool.slot_with, pool.name_of, pool.free) == ({}, {}, [])
