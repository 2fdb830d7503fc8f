"""Attention over a paged cache, and the writes into its pages."""

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens

__all__ = [
    "compute_slot_mapping",
    "paged_attention",
    "qk_norm_rope_and_cache_",
    "reshape_and_cache",
]


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


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of new tokens into the pages of a cache, in the cache's dtype.

    Source: vLLM's operation of this name.

    Args:
        key: [T, H, D], bfloat16, float16 or float32. Any strides; a last stride other than 1 costs a copy.
        value: [T, H, DV], key's dtype. Any strides; a last stride other than 1 costs a copy.
        key_cache: [blocks, block_size, H, D], bfloat16, float16 or float32. Written in place. The last stride must be
            1. Keys and values may share pages, as pages[..., :D] and pages[..., D:].
        value_cache: [blocks, block_size, H, DV], key_cache's dtype. Written in place. The last stride must be 1.
        slot_mapping: [N], int32 or int64. The slot of each of the first N tokens: block * block_size + offset. N is at
            most T. A token with a negative slot is not stored. No two tokens may have one slot. On key's device.

    Raises:
        ValueError: If a slot is not below blocks * block_size. On `mps`, such a slot raises a RuntimeError at the next
            synchronisation, and nothing is stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> pages = torch.zeros(3, 16, 2, 128)  # keys and values of 64
        >>> keys, values = pages.chunk(2, dim=-1)
        >>> x, slots = torch.ones(2, 2, 64), torch.tensor([20, -1])
        >>> torch_gdn.reshape_and_cache(x, x, keys, values, slots)
        >>> pages.sum((2, 3)).nonzero()
        tensor([[1, 4]])
    """
    torch.ops.gdn.reshape_and_cache_(key, value, key_cache, value_cache, slot_mapping)


def qk_norm_rope_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """Normalises and rotates each head of q and k, and writes k and v of new tokens into the pages of a cache.

    This is `qk_norm_rope` and then `reshape_and_cache`, but k is rounded once, to the dtype of the cache. On `mps` this
    is one launch.

    Args:
        q: [B, T, HQ, D], bfloat16, float16 or float32. Any strides; copied if its last stride is not 1.
        k: [B, T, HK, D], q's dtype. Any strides; copied as q is.
        v: [B, T, HK, DV], q's dtype. Any strides; copied as q is.
        cos: [B, T, P], bfloat16, float16 or float32. See `qk_norm_rope`.
        sin: cos's shape and dtype.
        key_cache: [blocks, block_size, HK, D], bfloat16, float16 or float32. Written in place. The last stride must be
            1. Keys and values may share pages, as pages[..., :D] and pages[..., D:].
        value_cache: [blocks, block_size, HK, DV], key_cache's dtype. Written in place. The last stride must be 1.
        slot_mapping: [N], int32 or int64. The slot of each of the first N tokens of B * T: block * block_size + offset.
            N is at most B * T. k and v of a token with a negative slot, or without one, are not stored. No two tokens
            may have one slot. On q's device.
        q_weight: [D], bfloat16, float16 or float32. Default: q and k are rotated without a norm.
        k_weight: [D], q_weight's dtype. Default: None; there are two weights or none.
        eps: Added to the mean. With 0, a head of zeros returns NaN. Default: 1e-6.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next and Qwen3.5 do. Default: False.

    Returns:
        q_out: [B, T, HQ, D], q's dtype. Contiguous.

    Raises:
        ValueError: If there is one weight, or if zero_centered is set without weights. If a slot is not below
            blocks * block_size. On `mps`, such a slot raises a RuntimeError at the next synchronisation, and nothing is
            stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> k = torch.tensor([3.0, 0.0, 5.0, 1.0]).view(1, 1, 1, 4)
        >>> keys, values = torch.zeros(2, 16, 1, 8).chunk(2, dim=-1)
        >>> cos, sin, slots = torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([20])
        >>> q_out = torch_gdn.qk_norm_rope_and_cache_(k, k, k, cos, sin, keys, values, slots)
        >>> keys[1, 4], values[1, 4]
        (tensor([[0., 3., 5., 1.]]), tensor([[3., 0., 5., 1.]]))
    """
    return torch.ops.gdn.qk_norm_rope_and_cache_(
        q, k, v, cos, sin, key_cache, value_cache, slot_mapping, q_weight, k_weight, eps, zero_centered
    )


def compute_slot_mapping(
    positions: Tensor, cu_seqlens: Tensor, block_table: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Finds where the keys and values of a batch's tokens go in a cache of pages, as `reshape_and_cache` needs it.

    A token at position p of sequence n gets the slot
    `block_table[n, p // block_size] * block_size + p % block_size`.

    Source: the kernel of this name in vLLM's block tables.

    Args:
        positions: [T], int32 or int64. The position of each token in its sequence.
        cu_seqlens: [N + 1], int32 or int64. Tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 belong to sequence n. The
            first boundary is 0, and the last is at most T. On the device of positions or on the CPU.
        block_table: [N, blocks], int32 or int64. The blocks of each sequence, in the order of its tokens. On
            the device of positions or on the CPU.
        block_size: The number of tokens per block. The blocks of a sequence have fewer than 2^31 tokens.
        slot_mapping: [slots], int32 or int64. Written in place; slots is at least T. Entries from cu_seqlens[N] on
            become -1, which `reshape_and_cache` skips.

    Raises:
        ValueError: If boundaries descend, if a position lies beyond the blocks of its sequence, or if a block is
            negative or its slots exceed slot_mapping's dtype. On `mps`, wrong contents raise a RuntimeError at the next
            synchronisation; the entry of such a token becomes -1.

    Example:
        >>> import torch, torch_gdn
        >>> table, slots = torch.tensor([[4, 1], [0, 2]]), torch.zeros(5, dtype=torch.int64)
        >>> torch_gdn.compute_slot_mapping(torch.tensor([15, 16, 20]), torch.tensor([0, 2, 3]), table, 16, slots)
        >>> slots
        tensor([79, 16, 36, -1, -1])
    """
    check_cu_seqlens("compute_slot_mapping", cu_seqlens)
    torch.ops.gdn.compute_slot_mapping_(positions, cu_seqlens, block_table, block_size, slot_mapping)
