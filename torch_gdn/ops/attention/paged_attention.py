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
    """Attends from packed sequences to the pages of a KV cache.

    One call takes prompts, parts of prompts and single tokens. The kernels read keys and values where they lie. On
    `mps`, the keys of a sequence with few queries are divided among threadgroups, and a second kernel merges their
    results.

    Source: PagedAttention (Kwon et al. 2023), with the arguments of FlashAttention's and vLLM's varlen functions.

    Args:
        q: [T, HQ, D], bfloat16, float16 or float32. The queries of one sequence after another. D is a multiple of 16
            and at most 256. Any strides; a last stride other than 1 costs a copy.
        key_cache: [blocks, block_size, HK, D], bfloat16, float16 or float32. HQ is a multiple of HK, and KV head h
            serves HQ / HK query heads, starting with h * HQ / HK. The last stride must be 1.
        value_cache: key_cache's shape and dtype. A value that is not finite may also reach queries of its sequence that
            do not see it, because they share tiles of keys. The last stride must be 1.
        block_table: [N, M], int32 or int64. Key i of sequence n is in block block_table[n, i // block_size]. Entries
            after a sequence's last key, or before its window, are not read. On the CPU or on q's device.
        cu_seqlens: [N + 1], int32 or int64. Sequence n has the queries from cu_seqlens[n] up to cu_seqlens[n + 1]. Rows
            of q after the last boundary are padding. A sequence without queries is skipped. With N = 0 nothing is
            written. On the CPU or on q's device.
        seq_lens: [N], int32 or int64. The number of keys of each sequence. Its queries are the last of them. On the CPU
            or on q's device.
        scale: Factor of q k^T. Default: D ** -0.5.
        causal: Whether a query sees no later key. Default: True.
        window: The number of keys that a query sees, up to its own position. With 0 it sees all of them. Requires
            causal. Default: 0.
        sinks: [HQ], float32. One more score for each head, whose value is zero (GPT-OSS). Default: None.
        max_query_len: An upper bound on the queries of a sequence. The host chooses the launches by it, so that it need
            not read the tensors. Default: T.
        max_seq_len: An upper bound on the keys of a sequence. Default: M * block_size.
        out: [T, HQ, D], q's dtype. The function writes the result here. The last stride must be 1. Default: a new
            tensor.

    Returns:
        out: [T, HQ, D], q's dtype. Rows of padding are not written; in a new tensor they are undefined.

    Raises:
        ValueError: If there is a window without causal, if a sequence is longer than its bound or its blocks, or if a
            block is not in the cache. For index tensors on the device, the last two are a RuntimeError at the next
            synchronisation; the kernels read no memory outside the tensors.

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
