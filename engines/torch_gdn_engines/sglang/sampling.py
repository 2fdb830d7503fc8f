"""Replaces request seeds, grammar masks and streams by PyTorch's operations.

SGLang reads a request's `sampling_seed` only with --enable-deterministic-inference, which on mps has no kernels, and
samples by it in float64, which mps does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BITS = 31  # per hash; products of two such numbers fit into int64
MOST = 2**BITS - 1


def scrambled(x: Tensor) -> Tensor:
    """Maps numbers of 31 bits one to one, by shifts and odd factors, as in MurmurHash3's finaliser (Appleby)."""
    for shift, factor in ((16, 0x45EBCA6B), (13, 0x42B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & MOST
    return x ^ (x >> 16)


def sample_by_seeds(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Replaces multinomial_with_seed. logprobs is [N, vocabulary]; seed and positions are [N]. Returns [N, 1].

    If each token i has an exponential number E_i, the least E_i / p_i belongs to token i with probability p_i. E is
    -log(u), with u uniform between 0 and 1 from a hash. Near 1 it is computed from 1 - u, so that float32 suffices.
    """
    rows = scrambled((seed & MOST) ^ scrambled((seed >> BITS) & MOST))
    rows = scrambled(rows ^ (positions.long() & MOST))
    h = scrambled(rows[:, None] ^ torch.arange(logprobs.shape[1], device=logprobs.device))
    low, high = ((x + 0.5) / 2.0**BITS for x in (h.float(), (MOST - h).float()))
    exponential = torch.where(h <= MOST // 2, -torch.log(low), -torch.log1p(-high))
    return torch.argmax(logprobs.float() - torch.log(exponential), dim=1, keepdim=True)


def sample_filtered(
    theirs: Callable[..., Any], probs: Tensor, *others: Any, return_filtered_probs: bool = False, **options: Any
) -> Any:
    """Replaces top_k_top_p_min_p_sampling_from_probs_torch.

    SGLang's function numbers tokens by their rank, so a seed would give other tokens in a batch with requests that have
    top_k. others: top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions.
    """
    seeds, positions = others[4:]
    if seeds is None:
        return theirs(probs, *others, return_filtered_probs=return_filtered_probs, **options)
    _, weights, ids, _ = theirs(probs, *others[:4], None, positions, return_filtered_probs=True, **options)
    filtered = torch.zeros_like(probs).scatter_(1, ids.long(), weights)
    chosen = sample_by_seeds(filtered.log(), seeds, positions)
    tokens = chosen.view(-1).to(torch.int32)
    return (tokens, weights, ids, filtered.gather(1, chosen).view(-1)) if return_filtered_probs else tokens


def with_seeds(theirs: Callable[..., Any], cls: type, batch: Any, *others: Any) -> Any:
    """Wraps SamplingBatchInfo.from_schedule_batch. If one request has a seed, the others get random ones."""
    info = theirs(cls, batch, *others)
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if any(seed is not None for seed in seeds):
        random = random_seeds(len(seeds)).tolist()
        chosen = [other if seed is None else seed for seed, other in zip(seeds, random, strict=True)]
        info.sampling_seed = torch.tensor(chosen, dtype=torch.int64).to(batch.device)
    return info


def merge_seeds(theirs: Callable[..., None], info: Any, other: Any) -> None:
    """Wraps SamplingBatchInfo.merge_batch: joins seeds if both batches have some."""
    if (info.sampling_seed is None) != (other.sampling_seed is None):
        for each in (info, other):
            if each.sampling_seed is None:
                each.sampling_seed = random_seeds(len(each)).to(each.device)
    theirs(info, other)


def random_seeds(n: int) -> Tensor:
    return torch.randint(2**BITS, (n,))


def mask_tokens(logits: Tensor, vocab_mask: Tensor) -> None:
    """Masks tokens that the grammar forbids (xgrammar)."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="torch_native")


def mask_tokens_of_grammar(grammar: Any, logits: Tensor, vocab_mask: Tensor) -> None:
    mask_tokens(logits, vocab_mask)


def record_stream(theirs: Callable[..., None], tensor: Tensor, stream: Any) -> None:
    """Replaces Tensor.record_stream. mps has one stream, which runs in order, and SGLang has a stand-in for it."""
    if tensor.device.type != "mps":
        theirs(tensor, stream)


def agree_on_tokens(*arguments: Any) -> None:
    """Does nothing: mps has one process, and torch.distributed has no collectives for it."""
