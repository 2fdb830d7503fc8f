"""Compares the replacements of vLLM's Triton kernels for sampling and slots with loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_gdn_engines.vllm import kernels

COUNTS = [2, 0, 4, 1, 3]  # drafts of each request
MOST, VOCABULARY = 4, 11


def draws(device: torch.device) -> dict[str, Tensor]:
    total = sum(COUNTS)
    drafts = torch.randint(VOCABULARY, (total,), dtype=torch.int32)
    drafts[3] = -1  # a draft that is padding
    target = torch.randint(VOCABULARY, (total,))
    agrees = torch.rand(total) < 0.7
    target[agrees] = drafts[agrees].clamp(min=0).long()
    made = {
        "cumulated": torch.tensor(COUNTS).cumsum(0).int(),
        "drafts": drafts,
        "target": target,
        "bonus": torch.randint(VOCABULARY, (len(COUNTS), 1)),
        "uniform": torch.rand(total),
        "recovered": torch.randint(VOCABULARY, (total,), dtype=torch.int32),
        "target_probs": torch.randn(total, VOCABULARY).softmax(-1),
        "draft_probs": torch.randn(total, VOCABULARY).softmax(-1),
        "rates": torch.tensor([0.9, 0.5, 0.3, 0.1]),
        "inverse": torch.rand(len(COUNTS), VOCABULARY).reciprocal(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def sampled(given: dict[str, Tensor], is_greedy: list[bool], accepts: Any, replaced: Tensor) -> list[list[int]]:
    """One request after the other: drafts while they are accepted, then what replaces one, or the bonus token."""
    rows, first = [], 0
    for request, count in enumerate(COUNTS):
        row = [-1] * (MOST + 1)
        if is_greedy[request]:
            for i in range(count):
                token = int(given["drafts"][first + i])
                if not accepts(first + i, i):
                    row[i] = int(replaced[first + i])
                    break
                row[i] = token
            else:
                row[count] = int(given["bonus"][request])
        rows.append(row)
        first += count
    return rows


def output_on(device: torch.device) -> Tensor:
    return torch.full((len(COUNTS), MOST + 1), -1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("is_greedy", [None, [True, True, False, True, False]], ids=["all", "some"])
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_rejection(is_greedy: list[bool] | None, synthetic: bool, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    given, out = draws(device), output_on(device)
    kernels.rejection_greedy_sample(
        out,
        given["cumulated"],
        given["drafts"],
        given["target"],
        given["bonus"],
        None if is_greedy is None else torch.tensor(is_greedy, device=device),
        MOST,
        given["uniform"] if synthetic else None,
        given["rates"] if synthetic else None,
        SYNTHETIC_MODE=synthetic,
    )

    def accepts(at: int, position: int) -> bool:
        if synthetic:
            return bool(given["uniform"][at] < given["rates"][position] and given["drafts"][at] >= 0)
        return int(given["drafts"][at]) == int(given["target"][at])

    assert out.tolist() == sampled(given, is_greedy or [True] * len(COUNTS), accepts, given["target"])


@pytest.mark.parametrize("has_probabilities", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_rejection(has_probabilities: bool, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    given, out = draws(device), output_on(device)
    is_greedy = [False, False, True, False, False]
    kernels.rejection_random_sample(
        out,
        given["cumulated"],
        given["drafts"],
        given["draft_probs"] if has_probabilities else None,
        given["target_probs"],
        given["bonus"],
        given["recovered"],
        given["uniform"],
        torch.tensor(is_greedy, device=device),
        MOST,
        VOCABULARY,
        None,
        NO_DRAFT_PROBS=not has_probabilities,
    )

    def accepts(at: int, position: int) -> bool:
        token = int(given["drafts"][at])
        if token < 0:
            return False
        draft = float(given["draft_probs"][at, token]) if has_probabilities else 1.0
        return float(given["target_probs"][at, token]) / draft >= float(given["uniform"][at])

    assert out.tolist() == sampled(given, [not x for x in is_greedy], accepts, given["recovered"])


@pytest.mark.parametrize("has_probabilities", [False, True])
def test_recovered_tokens(has_probabilities: bool, device: torch.device) -> None:
    """A draft that is padding, -1, excludes no token: not the last one, and not token 0, here the likeliest."""
    given = draws(device)
    given["target_probs"][:, 0] += 100
    out = torch.full((sum(COUNTS),), -1, dtype=torch.int32, device=device)
    kernels.sample_recovered_tokens(
        out,
        given["cumulated"],
        given["drafts"],
        given["draft_probs"] if has_probabilities else None,
        given["target_probs"],
        given["inverse"],
        VOCABULARY,
        NO_DRAFT_PROBS=not has_probabilities,
    )
    requests = [request for request, count in enumerate(COUNTS) for _ in range(count)]
    for at, request in enumerate(requests):
        weights = given["target_probs"][at].clone()
        if has_probabilities:
            weights = (weights - given["draft_probs"][at]).clamp(min=0)
        elif given["drafts"][at] >= 0:
            weights[int(given["drafts"][at])] = 0
        assert int(out[at]) == int((weights * given["inverse"][request]).argmax())


def test_expand(device: torch.device) -> None:
    values = torch.tensor([0.0, 2.0, 3.0, 0.0, 5.0], device=device)
    out = torch.empty(sum(COUNTS), device=device)
    kernels.expand(out, values, torch.tensor(COUNTS, device=device).cumsum(0).int(), 0, 1)
    assert out.tolist() == [1.0] * 2 + [3.0] * 4 + [1.0] + [5.0] * 3


def test_slot_mapping(device: torch.device) -> None:
    block_size, table = 16, torch.randperm(24).view(3, 8).int().to(device)
    starts, firsts = (
        [0, 3, 4, 24],
        [30, 100, 7],
    )  # of each request: its first token in the batch, and that one's position
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(firsts, (3, 1, 20), strict=True)]).to(device)
    slots = torch.full((30,), -7, device=device)
    kernels.compute_slot_mapping(
        24, 28, torch.tensor(starts, dtype=torch.int32, device=device), positions, table, 8, slots, block_size
    )
    want = []
    for request in range(3):
        for i in range(starts[request + 1] - starts[request]):
            block, offset = divmod(firsts[request] + i, block_size)
            want.append(int(table[request, block]) * block_size + offset)
    assert slots.tolist() == want + [-1] * 4 + [-7] * 2


def test_a_step_of_a_drafting_model(device: torch.device) -> None:
    block_size, longest, table = 4, 20, torch.randperm(30)[:15].view(3, 5).int()
    positions, seq_lens = [6, 19, 3], [8, 20, 5]  # the second is at the end
    given = [torch.tensor(positions), table, 5, torch.tensor(seq_lens, dtype=torch.int32), torch.full((3,), -7)]
    given = [x.to(device) if isinstance(x, Tensor) else x for x in given]
    slots = torch.full((5,), -7, device=device)
    kernels.eagle_step_slot_mapping_metadata(*given, slots, block_size, longest, 5, -1, 3)
    assert given[4].tolist() == [7, 0, 4]
    assert given[3].tolist() == [9, 1, 6]
    assert slots.tolist() == [int(table[0, 1]) * 4 + 3, -1, int(table[2, 1]) * 4, -1, -1]


def test_where_a_drafting_model_goes_on(device: torch.device) -> None:
    """A draft model continues after the accepted drafts, or from the last token without drafts."""
    starts = torch.tensor([0, 3, 10, 15, 17, 21], dtype=torch.int32, device=device)
    valid = [2, 0, 5, 1, 1]
    indices, rejected = (torch.full((6,), -7, dtype=torch.int32, device=device) for _ in range(2))
    cumulated = torch.tensor(COUNTS, device=device).cumsum(0).int()
    kernels.eagle_prepare_inputs_padded(
        cumulated, torch.tensor(valid, dtype=torch.int32, device=device), starts, indices, rejected, len(COUNTS)
    )
    want = [count + 1 - n if count else 0 for count, n in zip(COUNTS, valid, strict=True)]
    assert rejected.tolist() == [*want, -7]
    assert indices.tolist() == [*(int(end) - 1 - n for end, n in zip(starts[1:], want, strict=True)), -7]


def test_the_token_that_a_drafting_model_goes_on_with(device: torch.device) -> None:
    sampled = torch.tensor([[5, 6, -1], [7, 8, 9], [-1, -1, -1], [3, 4, VOCABULARY]], dtype=torch.int32, device=device)
    discarded = torch.tensor([False, True, False, False], device=device)
    backup = torch.tensor([100, 101, 102, 103], dtype=torch.int32, device=device)
    following, counts = (torch.full((5,), -7, dtype=torch.int32, device=device) for _ in range(2))
    kernels.eagle_prepare_next_token_padded(sampled, discarded, backup, following, counts, VOCABULARY, 3, 4, 3)
    assert following.tolist() == [6, 101, 102, 4, -7]
    assert counts.tolist() == [2, 0, 0, 2, -7]


def test_context_parallelism_is_refused() -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="context parallelism: expected 1 process, got 2"):
        kernels.compute_slot_mapping(0, 0, nothing, nothing, nothing, 1, nothing, 16, 2)
