"""Runs requests through transformers' continuous batching, and the same ones by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.integrations.models import VOCABULARY, distance, random_model, random_tokens
from tests.integrations.test_transformers import BAR
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import versions

NEW_TOKENS = 8
GREEDY_TOKENS, DRAFTS = 20, 8
OPTIONS = {"page_size": 16, "num_blocks": 128, "max_batch_tokens": 64}


def other_version(what: str) -> str:
    """Returns why this version of transformers skips the tests of `what`, or an empty string."""
    reason = versions.why_not_served(versions.installed())
    return f"{what} {reason}" if reason else ""


@dataclass
class Served:
    tokens: dict[str, list[int]]  # by request, if it finished
    cache: Any  # as it is after the last request


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_tokens(length, seed=length).tolist() for length in lengths]


def alone(model: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Returns what `generate()` gives for each prompt by itself."""
    result = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        result.append(tokens[0, len(prompt) :].tolist())
    return result


@contextmanager
def managed(model: Any, sequences: int = 1, new_tokens: int = NEW_TOKENS, **options: Any) -> Iterator[Any]:
    """Yields transformers' manager while it serves the model."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    generation.num_return_sequences = sequences  # transformers refuses it earlier, as greedy sequences are equal
    configuration = ContinuousBatchingConfig(**{**OPTIONS, **options})
    with model.continuous_batching_context_manager(generation, continuous_batching_config=configuration) as manager:
        yield manager


def results(manager: Any) -> Iterator[Any]:
    while True:
        if (result := manager.get_result(timeout=1)) is None:
            assert manager.is_running(), "the generation loop ended"
            continue
        assert result.error is None, result.error
        yield result


def served(
    model: Any,
    prompts: Sequence[list[int]],
    cancelled: Sequence[int] = (),
    sequences: int = 1,
    **options: Any,
) -> Served:
    """Serves all prompts at once. Cancels those whose numbers are in `cancelled` after their first token."""
    given_up = {f"request {n}" for n in cancelled}
    expected = len(prompts) * sequences - len(given_up)
    tokens: dict[str, list[int]] = {}
    with managed(model, sequences, **options) as manager:
        cache = manager.batch_processor.cache
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, f"request {number}", streaming=number in cancelled)
        for result in results(manager):
            if result.request_id in given_up:
                manager.cancel_request(result.request_id)
                given_up.remove(result.request_id)
            elif result.is_finished():
                tokens[result.request_id] = result.generated_tokens
            if len(tokens) == expected and not given_up:
                break
    return Served(tokens, cache)


class Passed:
    """Counts the tokens that pass through a model, and keeps the logits."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self.logits: list[Tensor] = []
        model.get_input_embeddings().register_forward_hook(self.count)
        model.register_forward_hook(self.keep)

    def count(self, _: Any, inputs: tuple[Tensor], __: Any) -> None:
        self.tokens += inputs[0].numel()

    def keep(self, _: Any, __: Any, output: Any) -> None:
        self.logits.append(output.logits[0].float().cpu())

    def forget(self) -> None:
        self.tokens, self.logits = 0, []


def assert_served_as_alone(
    kind: str, prompts: Sequence[list[int]], cancelled: Sequence[int] = (), device: str = "cpu", **options: Any
) -> Served:
    """Serves all prompts at once. Each one not cancelled must get the tokens of transformers' own `generate()`."""
    expected = {f"request {n}": x for n, x in enumerate(alone(random_model(kind), prompts)) if n not in cancelled}
    transformers.enable(continuous_batching=True)
    result = served(random_model(kind).to(device), prompts, cancelled, **options)
    assert result.tokens == expected
    assert_nothing_is_held(result.cache)
    return result


def greedy(model: Any, prompt: Tensor, **options: Any) -> tuple[list[int], Tensor]:
    """Returns the new tokens, and the logits that chose them."""
    given = {"max_new_tokens": GREEDY_TOKENS, "do_sample": False, "pad_token_id": 0}
    result = model.generate(
        prompt.to(model.device), return_dict_in_generate=True, output_logits=True, **given, **options
    )
    return result.sequences[0, prompt.shape[1] :].tolist(), torch.cat(result.logits).cpu()


class Drafter:
    """Proposes `accepted` tokens that greedy decoding chooses, and then wrong ones."""

    requires_model_outputs = False

    def __init__(self, right: list[int], prompt: int, accepted: list[int]) -> None:
        self.right, self.prompt, self.accepted = right, prompt, accepted
        self.calls = 0

    def get_candidates(self, tokens: Tensor) -> tuple[Tensor, None]:
        start, accepted = tokens.shape[1] - self.prompt, self.accepted[self.calls % len(self.accepted)]
        self.calls += 1
        following = self.right[start : start + DRAFTS]
        drafts = [token if n < accepted else token % (VOCABULARY - 1) + 1 for n, token in enumerate(following)]
        return torch.cat([tokens, torch.tensor([drafts], dtype=tokens.dtype, device=tokens.device)], 1), None

    def update_candidate_strategy(self, *_: Any) -> None: ...


def assert_drafts_change_nothing(
    model: Any, prompt: Tensor, accepted: list[int] | None = None, device: str | torch.device = "cpu", **options: Any
) -> int:
    """Asserts that assisted generation gives the tokens and logits of transformers' greedy decoding. With `accepted`,
    the drafts have these numbers of right tokens in turn. Returns the number of steps.
    """
    tokens, logits = greedy(model, prompt)
    transformers.enable(rollback=True)
    drafter = Drafter(tokens, prompt.shape[1], accepted or [])
    model = model.to(device)
    if accepted is not None:
        model._get_candidate_generator = lambda **_: drafter
        options["prompt_lookup_num_tokens"] = DRAFTS
    result, found_logits = greedy(model, prompt, **options)
    assert result == tokens
    assert distance(found_logits, logits) < BAR
    assert transformers.status().fallbacks.keys() <= {"experts"}  # those of GLM-5 Next have a gate of their own
    return drafter.calls


def assert_nothing_is_held(cache: Any) -> None:
    assert sorted(cache.states.free) == list(range(cache.states.slots))
    assert cache.states.slot_of == {}
    assert all(allocator.block_table == {} for allocator in cache.cache_allocators.values())
