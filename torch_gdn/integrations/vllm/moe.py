"""Mixture of experts on mps, where vLLM has no kernel for it: batched products of gathered matrices, in PyTorch.

The rows of an expert are padded to whole blocks, and a block is multiplied by its expert's matrices, which are gathered
for some blocks at a time. How many blocks there are at most follows from shapes: no tensor is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

LARGEST_BLOCK = 128  # rows
GATHERED = 2**27  # elements of weights at a time, 256 MiB of bfloat16


def fused_experts(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """x [T, H]; w13 [E, 2 I, H], gate above up; w2 [E, H, I]; topk_weights and topk_ids [T, topk]."""
    (tokens, topk), experts = topk_ids.shape, w13.shape[0]
    if tokens == 0:
        return torch.empty_like(x)
    block_size = min(LARGEST_BLOCK, 1 << ((tokens * topk - 1) // experts).bit_length())
    expert_ids, rows = align_block_size(topk_ids.flatten().long(), experts, block_size)
    token_of_row = rows.new_zeros(expert_ids.shape[0] * block_size)
    token_of_row[rows] = torch.arange(tokens * topk, device=x.device) // topk
    each = max(1, GATHERED // (w13[0].numel() + w2[0].numel()))
    parts = []
    for ids, of_rows in zip(expert_ids.split(each), token_of_row.split(each * block_size), strict=True):
        gate, up = torch.bmm(x[of_rows].unflatten(0, (-1, block_size)), w13[ids].transpose(1, 2)).chunk(2, dim=-1)
        parts.append(torch.bmm(silu(gate) * up, w2[ids].transpose(1, 2)).flatten(0, 1))
    out = torch.cat(parts)[rows].view(tokens, topk, -1)
    return (out * topk_weights[..., None]).sum(1).to(x.dtype)


def align_block_size(expert_of_pair: Tensor, experts: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The expert of each block, and the row of each pair of a token and an expert, in blocks of one expert each.

    As many blocks as there may be; those that are not needed are some expert's, with rows of no pair.
    """
    pairs = expert_of_pair.shape[0]
    if block_size == 1:
        return expert_of_pair, torch.arange(pairs, device=expert_of_pair.device)
    order = expert_of_pair.argsort(stable=True)
    ids = expert_of_pair[order]
    starts = torch.searchsorted(ids, torch.arange(experts + 1, device=ids.device))
    block_ends = ((starts.diff() + block_size - 1) // block_size).cumsum(0)
    first_rows = pad(block_ends[:-1], (1, 0)) * block_size
    rows = torch.empty_like(order)
    rows[order] = first_rows[ids] + torch.arange(pairs, device=ids.device) - starts[ids]
    most = (pairs + min(experts, pairs) * (block_size - 1)) // block_size
    blocks = torch.arange(most, device=ids.device)
    return torch.searchsorted(block_ends, blocks, right=True).clamp(max=experts - 1), rows
