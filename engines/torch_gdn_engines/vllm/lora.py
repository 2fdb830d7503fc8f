"""LoRA in two products a matrix for all adapters at once, on mps and, in place of vLLM's, on the CPU.

vLLM's own for the CPU, in PyTorch, gathers an adapter's matrices for each token, asks the device for counts on the
host, and in 0.32 gives tokens without an adapter (index -1) the last one's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def is_own(indices: Tensor, adapters: int) -> Tensor:
    """[T, adapters]; a row of an index of -1 has none."""
    return indices[:, None] == torch.arange(adapters, device=indices.device)


def shrink(y: Tensor, x: Tensor, lora_a: Tensor, indices: Tensor, scale: float) -> None:
    """y [T, rank] = scale * A x; lora_a [adapters, 1, rank, columns]."""
    products = (x.to(y.dtype) @ lora_a.to(y.dtype).flatten(0, 2).T).unflatten(-1, (lora_a.shape[0], -1))
    y[:, : products.shape[-1]] = scale * (products * is_own(indices, lora_a.shape[0])[..., None]).sum(1)


def expand(y: Tensor, x: Tensor, lora_b: Tensor, indices: Tensor) -> None:
    """y [T, rows] += B x; lora_b [adapters, 1, rows, rank]; of padded rows as many as both have."""
    rows = min(y.shape[1], lora_b.shape[-2])
    spread = (x[:, None] * is_own(indices, lora_b.shape[0])[..., None]).flatten(1)
    matrices = lora_b[:, 0, :rows].transpose(1, 2).flatten(0, 1)
    y[:, :rows] += spread.to(y.dtype) @ matrices.to(y.dtype)


class TorchGdnPunicaWrapper(PunicaWrapperCPU):
    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.no_lora = not any(number > 0 for number in mapping.index_mapping)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        if not self.no_lora:
            shrink(y.view(-1, y.shape[-1]), x, w_t_all, self.token_lora_indices, scale)

    def _apply_expand(
        self, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool = True
    ) -> None:
        if not self.no_lora:
            expand(y[:, y_offset : y_offset + y_slice_size], x, w_t_all, self.token_lora_indices)

    def add_lora_embedding(self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.no_lora:
            expand(y, x, lora_b_stacked, self.token_lora_indices)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        buffer = torch.zeros(x.shape[0], lora_b_stacked.shape[-1], dtype=torch.float32, device=x.device)
        shrink(buffer, x, lora_a_stacked, self.sampler_indices, scale)
        expand(y, buffer, lora_b_stacked, self.sampler_indices)
