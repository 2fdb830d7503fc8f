from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed sequences to the pages of a KV cache: prompts, parts of them and single tokens at once.

    Keys and values are read where they lie. On `mps` a sequence with few queries has its keys divided among
    threadgroups, whose results a second kernel merges.

    Source: PagedAttention (Kwon et al. 2023), with the arguments of FlashAttention's and vLLM's varlen functions.

    Args:
        q: [T, HQ, D], bfloat16, float16 or float32, the sequences one after another; D is a multiple of 16 up to 256.
            Any strides; a last stride other than 1 costs a copy.
        key_cache: [blocks, block_size, HK, D], bfloat16, float16 or float32, any strides but a last one of 1. HQ is a
            multiple of HK, and KV head h serves the query heads from h * HQ / HK on.
        value_cache: [blocks, block_size, HK, D], dtype of key_cache. A value that is not finite may reach queries of
            its sequence that do not see it: they share tiles of keys.
        block_table: [N, M] int32 or int64: key i of sequence n is in block block_table[n, i // block_size]. Entries
            beyond a sequence's keys, or before what a window shows, are not read.
        cu_seqlens: [N + 1] int32 or int64: sequence n has the queries from cu_seqlens[n] up to cu_seqlens[n + 1]. Rows
            of q beyond the last boundary are padding. A sequence without queries is skipped.
        seq_lens: [N] int32 or int64: the keys of each sequence, of which its queries are the last. These three may be
            on the CPU or on q's device. With N of 0 nothing is written.
        scale: Default: D ** -0.5.
        causal: a query sees no later key. Default: True.
        window: a query sees only so many keys up to its own position; 0 is no window. Default: 0.
        sinks: [HQ] float32, one more score for each head, whose value is zero (GPT-OSS). Default: None.
        max_query_len: at least the queries of any sequence: what is launched is chosen by it, so that the tensors need
            not be read by the host. Default: T.
        max_seq_len: at least the keys of any sequence. Default: M * block_size.
        out: [T, HQ, D], dtype of q, written in place; any strides but a last one of 1. Default: a new tensor.

    Returns:
        out. Its padding is left as it is: undefined in a new tensor.

    Raises:
        ValueError: a shape, size or device that is not as above, a window where causal is False, a sequence longer than
            its bound or its blocks, or a block that is not in the cache. What index tensors on the device hold is no
            ValueError but a RuntimeError of the next synchronisation; no memory outside the tensors is read.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> k, v, q = torch.randn(3, 16, 2, 64), torch.randn(3, 16, 2, 64), torch.randn(1, 4, 64)
        >>> table, boundaries = torch.tensor([[2, 0]]), torch.tensor([0, 1])
        >>> o = torch_gdn.paged_attention(q, k, v, table, boundaries, torch.tensor([20]))
        >>> keys, values = (torch.cat([x[2], x[0, :4]]).transpose(0, 1) for x in (k, v))
        >>> sdpa = torch.nn.functional.scaled_dot_product_attention
        >>> exact = sdpa(q.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True)
        >>> torch.allclose(o, exact[0].transpose(0, 1), atol=1e-5)
        True
    """
    check_cu_seqlens("paged_attention", cu_seqlens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    torch.ops.gdn.paged_attention_(
        out,
        q,
        key_cache,
        value_cache,
        block_table,
        cu_seqlens,
        seq_lens,
        max_query_len=q.size(0) if max_query_len is None else max_query_len,
        max_seq_len=block_table.size(1) * key_cache.size(1) if max_seq_len is None else max_seq_len,
        scale=scale,
        causal=causal,
        window=window,
        sinks=sinks,
    )
    return out
