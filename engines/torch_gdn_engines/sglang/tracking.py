"""Copies the states that a prefix cache keeps while requests decode (SGLang's `extra_buffer`), by `batch_copy_`."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_gdn


def track_all_layers(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies slot cache_indices[n] to mamba_track_indices[n] by the mask. Pools are [layers, slots, ...]."""
    source, destination, mask = (x[:batch_size] for x in (cache_indices, mamba_track_indices, mamba_track_mask))
    mask = mask & (source >= 0) & (destination >= 0)
    for pool in (conv_pool, ssm_pool):
        copy_slots(pool, source.long(), destination.long(), mask)


def track_one_layer(conv_states: Tensor, ssm_states: Tensor, *others: object, **options: object) -> None:
    track_all_layers(conv_states[None], ssm_states[None], *others, **options)  # type: ignore[arg-type]


def copy_slots(pool: Tensor, source: Tensor, destination: Tensor, mask: Tensor) -> None:
    """Copies slots of all layers in one launch. A sequence outside the mask copies no bytes."""
    size = pool.element_size()
    if not pool[0, 0].is_contiguous():
        raise ValueError(f"pool: expected contiguous slots, got strides {list(pool.stride())}")
    layers = torch.arange(pool.shape[0], device=pool.device).mul_(pool.stride(0)).add_(pool.storage_offset())
    sources, destinations = (
        torch.add(layers[:, None], slots.clamp(min=0), alpha=pool.stride(1)).flatten() * size
        for slots in (source, destination)
    )
    sizes = (mask.long() * pool[0, 0].numel() * size).repeat(pool.shape[0])
    whole = torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())
    torch_gdn.batch_copy_(whole, sources, destinations, sizes)
