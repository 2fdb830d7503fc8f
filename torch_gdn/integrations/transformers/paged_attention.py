"""Lets continuous batching attend to the pages themselves.

In each layer, transformers' `sdpa` gathers the keys and values of all requests of a batch, and masks those of other
requests: its copies and mask grow with the whole batch. `torch_gdn.paged_attention` reads the pages in place.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.utils import find_head_dim

import torch_gdn
from torch_gdn.integrations.serving import PagedBatch, attends_to_heads
from torch_gdn.integrations.transformers.calls import Bound
from torch_gdn.integrations.transformers.state_pool import Part


@dataclass
class PagedStep(PagedBatch):
    slots: Tensor  # [T] int32: where the tokens' keys and values go


def takes(config: Any) -> bool:
    """Returns whether torch_gdn computes a model's attention: sdpa would, over all tokens, with known heads."""
    if not set(config.layer_types) <= {FULL_ATTENTION, "linear_attention"}:
        return False
    return config._attn_implementation == "sdpa" and attends_to_heads(find_head_dim(config))


def step_of(pages: Any, parts: Sequence[Part], device: torch.device) -> PagedStep:
    """Prepares a step. `pages` is transformers' allocator."""
    size = pages.tokens_per_page
    blocks = [pages.block_table[part.request] for part in parts]
    columns = max(map(len, blocks))
    lists = (
        [
            row[token // size] * size + token % size
            for row, part in zip(blocks, parts, strict=True)
            for token in range(part.past, part.past + part.tokens)
        ],
        [block for row in blocks for block in (*row, *[0] * (columns - len(row)))],
        [0, *itertools.accumulate(part.tokens for part in parts)],
        lengths := [part.past + part.tokens for part in parts],
    )
    numbers = torch.tensor([*itertools.chain(*lists)], dtype=torch.int32).to(device, non_blocking=True)
    slots, table, cu_seqlens, seq_lens = numbers.split([len(x) for x in lists])
    longest = max(part.tokens for part in parts)
    return PagedStep(table.view(len(parts), columns), cu_seqlens, seq_lens, longest, max(lengths), slots)


def pages_of(pages: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Returns the layer's keys and values, each [blocks, block_size, HK, D]. A block holds those of all layers."""
    rows = pages.cache_tensor.view(-1, 2 * pages.pages_per_block, pages.tokens_per_page, *pages.cache_tensor.shape[2:])
    first = 2 * pages.layer_indices.index(layer)
    return rows[:, first], rows[:, first + 1]


def attention_over_pages(bind: Callable[..., Bound], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps transformers' `sdpa`: torch_gdn serves the calls on a cache with a paged step.

    These have neither the mask nor the indices that `sdpa` needs. One with an unknown argument is therefore an error.
    """
    if getattr(kwargs.get("cache"), "paged_step", None) is None:
        return original(*args, **kwargs)
    given, options, unknown = bind(args, kwargs)
    if unknown:
        raise ValueError(f"continuous batching: attention to pages: {unknown}")
    return attend_to_pages(*given, **options)


def attend_to_pages(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    /,
    attention_mask: Tensor | None = None,  # a placeholder
    *,
    cache: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # says only that there is a mask
) -> tuple[Tensor, None]:
    if dropout:
        raise ValueError(f"continuous batching: dropout: expected 0, got {dropout}")
    step: PagedStep = cache.paged_step
    pages = cache.layer_to_allocator[module.layer_idx]
    key_pages, value_pages = pages_of(pages, module.layer_idx)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    torch_gdn.reshape_and_cache(k, v, key_pages, value_pages, step.slots)
    o = torch_gdn.paged_attention(q, key_pages, value_pages, scale=scaling, **step.sequences)
    return o[None], None
