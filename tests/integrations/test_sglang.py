"""Tests the parts of the SGLang plugin that need no SGLang: sampling by seeds, and copies of states between slots."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
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


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports the kernels' module without SGLang, of which it may want one base class."""
    name = "sglang.srt.layers.attention.linear.kernels.kernel_backend"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setattr(sys.modules[name], "LinearAttnKernelBase", object, raising=False)
    return importlib.import_module("torch_gdn.integrations.sglang.kernels")


def test_an_unknown_argument_is_refused_where_sglangs_kernel_cannot_run(kernels: Any) -> None:
    x, states, slots = torch.zeros(2, 4), torch.zeros(2, 4, 3), torch.arange(2, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    known = {"pad_slot_id": -1, "validate_data": False}
    weight = torch.zeros(4, 4)
    kernels.convolve_tokens(x, states, weight, conv_state_indices=slots, intermediate_conv_window=None, **known)
    kernels.convolve_prompts(x.t(), weight, None, states, starts, cache_indices=slots, block_table=None, **known)
    calls = [
        ("causal_conv1d_update", kernels.convolve_tokens, (x, states, weight)),
        ("causal_conv1d_fn", kernels.convolve_prompts, (x.t(), weight, None, states, starts)),
    ]
    for function, run, given in calls:
        with pytest.raises(NotImplementedError, match=f"{function}: block_table: .* does not know this argument"):
            run(*given, block_table=slots)
    rule, q = kernels.DeltaRule(), torch.zeros(1, 2, 1, 4)
    pools = {"ssm_states": torch.zeros(2, 1, 4, 4), "cache_indices": slots, "query_start_loc": starts}
    for name, own in (("decode", {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1)}), ("extend", {})):
        gates = torch.zeros(2, 1) if name == "decode" else torch.zeros(1, 2, 1)
        with pytest.raises(NotImplementedError, match=f"TritonGDNKernel.{name}: retrieve_next_token: "):
            getattr(rule, name)(q, q, q, gates, gates, **pools, **own, retrieve_next_token=slots)


def test_a_router_with_an_unknown_argument_is_sglangs(kernels: Any) -> None:
    seen: list[dict[str, Any]] = []

    def theirs(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return SimpleNamespace()

    logits = torch.randn(2, 8)
    assert isinstance(kernels.router(theirs, logits, logits, 2, True, another=None), tuple) and not seen
    kernels.router(theirs, logits, logits, 2, True, another=1)
    assert [options["another"] for options in seen] == [1]
