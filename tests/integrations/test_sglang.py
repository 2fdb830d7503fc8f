"""Tests the parts of the SGLang plugin that need no SGLang: sampling by seeds, and copies of states between slots."""

from __future__ import annotations

import torch

from torch_gdn.integrations.sglang import sampling, tracking


def test_tokens_are_as_frequent_as_likely_over_seeds_and_over_positions(device: torch.device) -> None:
    p, n = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.025, 0.005]), 20_000
    same, others = torch.full((n,), 2**40), torch.arange(n)
    logprobs = p.log().expand(n, -1).to(device)
    for seeds, positions in ((others, same), (same, others)):
        tokens = sampling.sample_by_seeds(logprobs, seeds.to(device), positions.to(device))[:, 0]
        counts = tokens.cpu().bincount(minlength=len(p))
        deviations = (counts - n * p) / (n * p * (1 - p)).sqrt()
        assert deviations.abs().max() < 4, deviations


def test_filtered_tokens_are_those_of_the_whole_vocabulary(device: torch.device) -> None:
    """A seed chooses a token by its id, whatever its rank. Here the filter keeps all tokens."""

    def by_rank(probs: torch.Tensor, *others: object, **options: object) -> tuple[torch.Tensor, ...]:
        weights, ids = probs.sort(dim=-1, descending=True)
        return ids[:, 0], weights, ids, weights[:, 0]

    probs = torch.rand(50, 20).softmax(-1).to(device)
    seeds, positions = torch.arange(50).to(device), torch.arange(50).to(device)
    filtered = sampling.sample_filtered(by_rank, probs, None, None, None, False, seeds, positions)
    assert filtered.tolist() == sampling.sample_by_seeds(probs.log(), seeds, positions)[:, 0].tolist()


def test_states_are_copied_where_the_mask_says_so(device: torch.device) -> None:
    """A request with a freed slot, -1, is skipped, and so is everything after the batch."""
    pools = [torch.randn(3, 8, 5, 3), torch.randn(3, 8, 4, 6)]
    wanted = [pool.clone() for pool in pools]
    for pool in wanted:
        pool[:, 5], pool[:, 7] = pool[:, 1].clone(), pool[:, 2].clone()
    found = [pool.to(device) for pool in pools]
    source, destination = (torch.tensor(x, device=device) for x in ([1, 3, -1, 2, 0], [5, 4, 6, 7, 3]))
    mask = torch.tensor([True, False, True, True, True], device=device)
    tracking.track_all_layers(*found, source, mask, destination, batch_size=4)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True))
