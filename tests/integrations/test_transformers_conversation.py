"""Tests that a conversation's turns prefill only their own tokens, change no token, and keep to a memory budget."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from tests.helpers.devices import ready
from tests.integrations.models import SERVED_KINDS, attention_model, distance, random_model, random_tokens
from tests.integrations.serving import Passed, other_version

if reason := other_version("ConversationCache"):
    pytest.skip(reason, allow_module_level=True)

from torch_gdn.integrations.transformers.conversation import ConversationCache

ANSWER = 6
OPTIONS = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
PLENTY = 2**30
each_kind = pytest.mark.parametrize("kind", SERVED_KINDS)
pytestmark = pytest.mark.usefixtures("enabled")


def from_scratch(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Generates with a mask, because an answer may contain the token used for padding."""
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS)


def sliding_model() -> Any:
    layers = ["sliding_attention", "full_attention"]
    return attention_model(layer_types=layers, use_sliding_window=True, sliding_window=16)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", [*SERVED_KINDS, "sliding window"])
def test_ten_turns(kind: str) -> None:
    model = sliding_model() if kind == "sliding window" else random_model(kind)
    conversations, passed = ConversationCache(model, PLENTY, every=64), Passed(model)
    text = torch.empty(1, 0, dtype=torch.long)
    for turn, own in enumerate([70, 3, 1, 150, 20, 64, 2, 5, 90, 7]):
        prompt = torch.cat([text, random_tokens(1, own, seed=turn)], 1)
        expected = from_scratch(model, prompt)
        passed.tokens = 0
        text = conversations.generate(prompt, **OPTIONS)
        assert text.tolist() == expected.tolist()
        prefilled = own + (turn > 0)  # an answer's last token has not passed through the model
        assert passed.tokens == prefilled + ANSWER - 1
        assert conversations.last.prefilled == prefilled
        assert conversations.last.reused == prompt.shape[1] - prefilled


@each_kind
def test_logits_of_a_hit_are_those_of_a_miss(kind: str) -> None:
    model, prompt = random_model(kind), random_tokens(1, 200)
    conversations = ConversationCache(model, PLENTY, every=64)
    asked = OPTIONS | {"return_dict_in_generate": True, "output_logits": True}
    missed = conversations.generate(prompt, **asked)
    assert conversations.last.reused == 0
    hit = conversations.generate(prompt, **asked)
    assert conversations.last.reused == 199
    assert distance(torch.cat(hit.logits), torch.cat(missed.logits)) < 1e-6


@pytest.mark.parametrize(("shared", "reused"), [(63, 0), (64, 64), (150, 128), (199, 199)])
def test_another_continuation_goes_on_from_the_last_state_before_it(shared: int, reused: int) -> None:
    model, first = random_model("qwen3_5"), random_tokens(1, 200)
    conversations = ConversationCache(model, PLENTY, every=64)
    conversations.generate(first, **OPTIONS)
    second = torch.cat([first[:, :shared], first[:, shared : shared + 1] % 63 + 1, random_tokens(1, 30, seed=2)], 1)
    expected = from_scratch(model, second)
    assert conversations.generate(second, **OPTIONS).tolist() == expected.tolist()
    assert conversations.last.reused == reused


def stored_bytes(conversations: ConversationCache) -> int:
    tensors = [y for x in conversations.nodes() for piece in x.pieces.values() for y in piece.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_memory_stays_within_the_budget_over_200_requests() -> None:
    model = random_model("qwen3_5")
    conversations = ConversationCache(model, 400_000, every=64)
    taken = []
    for request in range(200):
        conversations.generate(random_tokens(1, 10 + request % 70, seed=request), **OPTIONS | {"max_new_tokens": 1})
        taken.append(stored_bytes(conversations))
        assert taken[-1] == conversations.nbytes
    assert max(taken) <= 400_000
    assert min(taken[20:]) > 300_000  # most of the budget is used


def test_what_was_used_least_recently_is_dropped_first() -> None:
    model, prompts = random_model("qwen3_5"), [random_tokens(1, 20, seed=n) for n in range(4)]
    conversations = ConversationCache(model, PLENTY, every=64)

    def reused(n: int) -> int:
        conversations.generate(prompts[n], **OPTIONS | {"max_new_tokens": 1})
        return conversations.last.reused

    assert reused(0) == 0
    conversations.max_bytes = 3 * conversations.nbytes
    assert [reused(n) for n in (1, 2, 0, 3)] == [0, 0, 19, 0]
    assert [reused(n) for n in (0, 2, 3)] == [19, 19, 19]
    assert reused(1) == 0


def test_a_budget_too_small_for_anything_is_no_cache() -> None:
    model, prompt = random_model("qwen3_5"), random_tokens(1, 150)
    conversations = ConversationCache(model, 1, every=64)
    expected = from_scratch(model, prompt).tolist()
    for _ in range(2):
        assert conversations.generate(prompt, **OPTIONS).tolist() == expected
        assert (conversations.last.reused, conversations.nbytes) == (0, 0)


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "sliding window"])
def test_saved_and_loaded(kind: str, tmp_path: pathlib.Path) -> None:
    model = sliding_model() if kind == "sliding window" else random_model(kind)
    conversations = ConversationCache(model, PLENTY, every=64)
    text = conversations.generate(random_tokens(1, 150), **OPTIONS)
    other = conversations.generate(random_tokens(1, 30, seed=2), **OPTIONS)
    conversations.save(tmp_path / "conversations.safetensors")
    loaded = ConversationCache(model, PLENTY)
    loaded.generate(random_tokens(1, 9, seed=4), **OPTIONS)  # which the file replaces
    loaded.load(tmp_path / "conversations.safetensors")
    assert loaded.nbytes == conversations.nbytes == sum(node.nbytes for node in loaded.nodes())
    for told in (text, other):
        prompt = torch.cat([told, random_tokens(1, 4, seed=3)], 1)
        expected = from_scratch(model, prompt).tolist()
        assert loaded.generate(prompt, **OPTIONS).tolist() == expected
        assert loaded.last.prefilled == 5


def test_loading_keeps_to_the_budget_and_to_what_was_used_last(tmp_path: pathlib.Path) -> None:
    model, prompts = random_model("qwen3_5"), [random_tokens(1, 20, seed=n) for n in range(3)]
    conversations = ConversationCache(model, PLENTY)
    for n in (0, 1, 2, 0):
        conversations.generate(prompts[n], **OPTIONS | {"max_new_tokens": 1})
    conversations.save(tmp_path / "conversations.safetensors")
    loaded = ConversationCache(model, conversations.nbytes * 2 // 3)
    loaded.load(tmp_path / "conversations.safetensors")
    assert loaded.nbytes <= loaded.max_bytes
    assert [loaded.longest_prefix(prompt[0].tolist()).length for prompt in prompts] == [20, 0, 20]


def test_another_models_conversations_are_refused(tmp_path: pathlib.Path) -> None:
    conversations = ConversationCache(random_model("qwen3_5"), PLENTY)
    conversations.generate(random_tokens(1, 5), **OPTIONS)
    conversations.save(tmp_path / "conversations.safetensors")
    scaled = random_model("qwen3_5")
    scaled.config.rms_norm_eps = 1e-3
    trained = random_model("qwen3_5")
    trained.model.norm.weight.data[-1] += 1
    for other in (random_model("qwen3_5", seed=1), scaled, trained):
        with pytest.raises(ValueError, match="expected conversations of model"):
            ConversationCache(other, PLENTY).load(tmp_path / "conversations.safetensors")


def test_another_file_is_refused(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="path: expected a file of 'torch_gdn conversations 1', got None"):
        ConversationCache(random_model("qwen3_5"), PLENTY).load(tmp_path / "other.safetensors")


def test_on_mps() -> None:
    model, device, prompt = random_model("qwen3_next"), ready("mps"), random_tokens(1, 70)
    expected = from_scratch(model, prompt)
    following = torch.cat([expected, random_tokens(1, 3, seed=2)], 1)
    expected_then = from_scratch(model, following)
    conversations = ConversationCache(model.to(device), PLENTY, every=64)
    assert conversations.generate(prompt.to(device), **OPTIONS).tolist() == expected.tolist()
    assert conversations.generate(following.to(device), **OPTIONS).tolist() == expected_then.tolist()
    assert conversations.last.prefilled == 4


@pytest.mark.parametrize(
    ("input_ids", "options", "message"),
    [
        (torch.ones(2, 3, dtype=torch.long), {}, r"input_ids: expected shape \[1, T\], got \[2, 3\]"),
        (torch.ones(1, 3, dtype=torch.long), {"past_key_values": 1}, "past_key_values: expected None"),
        (torch.ones(1, 3, dtype=torch.long), {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: expected"),
        (torch.ones(1, 3, dtype=torch.long), {"assistant_model": 1}, "assistant_model: expected None"),
        (
            torch.ones(1, 2, dtype=torch.long),
            {"attention_mask": torch.tensor([[0, 1]])},
            "attention_mask: expected only ones",
        ),
    ],
)
def test_what_is_refused(input_ids: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConversationCache(random_model("qwen3_5"), PLENTY).generate(input_ids, **options)


@pytest.mark.parametrize("option", [{"max_bytes": 0}, {"max_bytes": 1, "every": 100}])
def test_arguments_are_checked(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{list(option)[-1]}: expected"):
        ConversationCache(random_model("qwen3_5"), **option)


def test_more_than_metal_recommends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen3_5").to(ready("mps"))
    allocated = torch.mps.current_allocated_memory()
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: allocated + 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"^ConversationCache: max_bytes: .+ recommends"):
        ConversationCache(model, 1001)
    assert ConversationCache(model, 1000).max_bytes == 1000
