"""Computes full attention over SGLang's pool of tokens by `reshape_and_cache` and `paged_attention`, with pages of one
token.

SGLang's torch_native gathers the keys and values of each request and attends to them one request after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

import torch_gdn
from torch_gdn.integrations.serving import PagedBatch, attends_to_heads


def metadata_of(forward_batch: Any, req_to_token: Tensor) -> PagedBatch:
    """Returns what all layers of a step share. A row of its table [N, longest sequence] has the slot of each token."""
    longest = int(forward_batch.seq_lens_cpu.max())
    if forward_batch.forward_mode.is_decode():
        n = forward_batch.batch_size
        cu_seqlens = torch.arange(n + 1, dtype=torch.int32, device=req_to_token.device)
        queries = 1
    else:
        lengths = forward_batch.extend_seq_lens
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
        queries = max(forward_batch.extend_seq_lens_cpu)
    table = req_to_token[forward_batch.req_pool_indices, :longest]
    return PagedBatch(table, cu_seqlens, forward_batch.seq_lens, queries, longest)


class PagedAttention(TorchNativeAttnBackend):
    """Replaces SGLang's TorchNativeAttnBackend, which still computes what `paged_attention` does not take."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        is_plain = mode.is_decode() or mode.is_extend()
        takes = is_plain and forward_batch.batch_size and not self.use_sliding_window_kv_pool
        self.forward_metadata = metadata_of(forward_batch, self.req_to_token_pool.req_to_token) if takes else None

    def takes(self, layer: Any, key: Tensor | None, save_kv_cache: bool) -> bool:
        heads_fit = layer.qk_head_dim == layer.v_head_dim and attends_to_heads(layer.qk_head_dim)
        is_decoder = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
        if self.forward_metadata is None or key is None or not (heads_fit and is_decoder and save_kv_cache):
            return False
        return bool(self.token_to_kv_pool.get_key_buffer(layer.layer_id).dtype == key.dtype)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        if self.takes(layer, k, save_kv_cache) and all(each is None for each in others.values()):
            return self.attend(q, k, v, layer, forward_batch.out_cache_loc)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        if self.takes(layer, k, save_kv_cache) and all(each is None for each in others.values()):
            return self.attend(q, k, v, layer, forward_batch.out_cache_loc)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, slots: Tensor) -> Tensor:
        m: Any = self.forward_metadata
        size = layer.qk_head_dim
        keys, values = (
            buffer(layer.layer_id)[:, None]
            for buffer in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
        )
        k, v = (x.reshape(-1, layer.tp_k_head_num, size) for x in (k, v))
        torch_gdn.reshape_and_cache(k, v, keys, values, slots)
        window = layer.sliding_window_size  # how far back a query sees, or -1
        out = torch_gdn.paged_attention(
            q.reshape(-1, layer.tp_q_head_num, size),
            keys,
            values,
            scale=layer.scaling,
            window=window + 1 if window is not None and window > -1 else 0,
            **m.sequences,
        )
        return out.flatten(1)
