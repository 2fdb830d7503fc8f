"""vLLM's rotary embeddings and SwiGLU on mps, each in one launch. vLLM's own code calls several operators."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, apply_interleaved_rope


class TorchGdnSiluAndMul(SiluAndMul):
    def forward_oot(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.ops.gdn.act_and_mul(gate, up)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Rotates q and k [T, heads * D] by the angles [T, P]."""
    heads = [x.view(1, x.shape[0], -1, head_size) for x in (query, key)]
    q, k = torch.ops.gdn.qk_norm_rope(*heads, cos[None], sin[None])
    return q.view(query.shape), k.view(key.shape)


class TorchGdnRotaryEmbedding(RotaryEmbedding):
    def forward_oot(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if key is None or not self.is_neox_style or query.dim() != 2:
            return self.forward_native(positions, query, key)
        cos, sin = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten()).chunk(2, dim=-1)
        return rotate(query, key, cos, sin, self.head_size)


class TorchGdnMRotaryEmbedding(MRotaryEmbedding):
    """Takes positions [T] of text, or [3, T] of a model that also takes images."""

    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        is_split = positions.dim() == 2 and not self.mrope_interleaved
        if key is None or not self.is_neox_style or query.dim() != 2 or is_split:
            return self.forward_native(positions, query, key, offsets)
        cos, sin = self._match_cos_sin_cache_dtype(query)[positions].chunk(2, dim=-1)
        if positions.dim() == 2:
            cos, sin = (apply_interleaved_rope(x, self.mrope_section) for x in (cos, sin))
        return rotate(query, key, cos, sin, self.head_size)


def register() -> None:
    SiluAndMul.register_oot(TorchGdnSiluAndMul)
    RotaryEmbedding.register_oot(TorchGdnRotaryEmbedding)
    MRotaryEmbedding.register_oot(TorchGdnMRotaryEmbedding)
