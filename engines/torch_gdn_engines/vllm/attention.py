"""Full attention over vLLM's blocks: `reshape_and_cache` and `paged_attention`.

A block is [KV heads, block_size, content]: the content of a cell, one token of one head, is its key and its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.kv_cache_layout import KVCacheLayout

import torch_gdn
from torch_gdn.integrations.serving import PagedBatch


@dataclass
class PagedMetadata(PagedBatch):
    """The metadata of a batch. The tensors are on the device and stay there."""

    num_actual_tokens: int
    slot_mapping: Tensor
    causal: bool
    exact: Any = None  # ring_buffers.Step, of pages of codes


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        m = common_attn_metadata
        return PagedMetadata(
            num_actual_tokens=m.num_actual_tokens,
            slot_mapping=m.slot_mapping[: m.num_actual_tokens],
            block_table=m.block_table_tensor[: m.num_reqs],
            cu_seqlens=m.query_start_loc[: m.num_reqs + 1],
            seq_lens=m.seq_lens[: m.num_reqs],
            max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len,
            causal=bool(m.causal),
        )


class PagedAttention(AttentionImpl[PagedMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        for name, value in (("alibi_slopes", alibi_slopes), ("logits_soft_cap", logits_soft_cap)):
            if value:
                raise NotImplementedError(f"attention: expected no {name}, got {value}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attention: expected decoder attention, got {attn_type}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale, self.window, self.kv_cache_dtype = float(scale), sliding_window or 0, kv_cache_dtype
        self.sinks = None if sinks is None else sinks.float()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def keys_and_values(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [blocks, block_size, KV heads, D], views of [blocks, KV heads, block_size, 2 D]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        torch_gdn.reshape_and_cache(key, value, *self.keys_and_values(kv_cache), slot_mapping[: key.shape[0]])

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,  # None if `rotary.project` stored keys and values
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention: output_scale: expected None, got scales of a quantised output")
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        m, n = attn_metadata, attn_metadata.num_actual_tokens
        if n < output.shape[0]:
            output[n:].zero_()  # padding, with which the layers behind this one compute
        return self.attend(layer, query[:n], key, value, kv_cache, m, output[:n])

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        m: PagedMetadata,
        output: Tensor,
    ) -> Tensor:
        return torch_gdn.paged_attention(
            query,
            *self.keys_and_values(kv_cache),
            scale=self.scale,
            causal=m.causal,
            window=self.window,
            sinks=self.sinks,
            out=output,
            **m.sequences,
        )


class PagedBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True
