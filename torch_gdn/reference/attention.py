"""Attention to the pages of a KV cache, and writing to them."""

import torch
from torch import Tensor

from torch_gdn.reference.aura import TILE, attend, visible
from torch_gdn.reference.common import compute_dtype, sequences
from torch_gdn.reference.layers import qk_norm_rope

__all__ = [
    "aura_paged_tile_means",
    "compute_slot_mapping",
    "paged_attention",
    "qk_norm_rope_and_cache_",
    "reshape_and_cache",
]

LEAST_KEYS = 32  # least keys of a mean; with fewer keys, the mean of the previous tile is better


def compute_slot_mapping(
    positions: Tensor, cu_seqlens: Tensor, block_table: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Goes token by token. Writes slot_mapping [slots] in place, with -1 after the last token."""
    slot_mapping.fill_(-1)
    for n, _, first, last, _ in sequences(1, 0, cu_seqlens):
        for token in range(first, last):
            block, offset = divmod(int(positions[token]), block_size)
            slot_mapping[token] = block_table[n, block] * block_size + offset


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copies token t of key and value [T, H, D] to slot_mapping[t] of caches [blocks, block_size, H, D], in place."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, slot % block_size] = value[token].to(value_cache.dtype)


def qk_norm_rope_and_cache_(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor,
    slot_mapping: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
    zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    q, k = qk_norm_rope(q, k, cos, sin, q_weight, k_weight, eps, zero_centered)
    reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), key_cache, value_cache, slot_mapping)
    return q


def aura_paged_tile_means(
    keys: Tensor, tile_means: Tensor, block_table: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, exact_keys: Tensor,
    exact_slots: Tensor, exact_starts: Tensor, max_query_len: int | None = None, max_seq_len: int | None = None,
    exact_sinks: int = 0, tail: int = 0,
) -> None:  # fmt: skip
    """Tile by tile; tile_means [blocks, tiles of a block, HK, D] is written in place, earlier tiles first."""
    tiles_of_block, ring = tile_means.shape[1], exact_keys.shape[1] - exact_sinks
    for n, _, first, last, _ in sequences(1, 0, cu_seqlens):
        length, slot = int(seq_lens[n]), int(exact_slots[n])
        first_new = length - (last - first)
        known = {position: keys[first + position - first_new] for position in range(first_new, length)}
        if slot >= 0:
            held = range(max(exact_sinks, first_new - tail, int(exact_starts[n])), first_new)
            known |= {position: exact_keys[slot, exact_sinks + position % ring] for position in held}
        for tile in range(-(-first_new // TILE), -(-length // TILE) if first < last else 0):
            own, before = ((block_table[n, i // tiles_of_block], i % tiles_of_block) for i in (tile, max(tile - 1, 0)))
            end = min((tile + 1) * TILE, length)
            result = [known[position] for position in range(max(end - TILE, exact_sinks), end) if position in known]
            if len(result) < LEAST_KEYS and tile > 0:
                tile_means[own] = tile_means[before]
                continue
            mean = torch.stack(result).to(compute_dtype(keys)).mean(0) if result else torch.zeros_like(keys[0])
            is_kept = mean.abs() < 65520  # what is larger would become infinite
            tile_means[own] = torch.where(is_kept, mean, 0.0).to(tile_means.dtype)


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    scale: float | None = None, causal: bool = True, window: int = 0, sinks: Tensor | None = None,
    max_query_len: int | None = None, max_seq_len: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attends sequence by sequence to keys and values [HK, T, D] gathered from the blocks. Padding of `out` stays."""
    out = torch.zeros_like(q) if out is None else out
    block_size, ratio = key_cache.shape[1], q.shape[1] // key_cache.shape[2]
    for n, _, first, last, _ in sequences(1, 0, cu_seqlens):
        if first == last:
            continue
        length = int(seq_lens[n])
        blocks = block_table[n, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(ratio, 0)
            for cache in (key_cache, value_cache)
        )
        seen = visible(1, last - first, length, None, causal, None, window, q.device)
        here = attend(q[None, first:last].transpose(1, 2), keys[None], values[None], seen, scale, sinks)
        out[first:last] = here[0].transpose(0, 1)
    return out
