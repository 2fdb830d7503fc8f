from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.reference.aura.aura_decode import aura_decode
from torch_gdn.reference.common import compute_dtype


def aura_attention(
    q: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    key_signs: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    value_signs: Tensor,
    key_means: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int | None = None,
) -> Tensor:
    """Attention of q [B, HQ, L, D] to the decoded keys and values, T each: the definition. `block_size` is ignored."""
    dtype = compute_dtype(q)
    B, HQ, L, D = q.shape
    T, ratio = key_codes.shape[2], HQ // key_codes.shape[1]
    keys = aura_decode(key_codes, key_norms, key_codebook, key_signs, key_means, dtype=dtype)
    values = aura_decode(value_codes, value_norms, value_codebook, value_signs, value_means, dtype=dtype)
    keys, values = (x.repeat_interleave(ratio, dim=1) for x in (keys, values))
    scores = (D**-0.5 if scale is None else scale) * (q.to(dtype) @ keys.transpose(-1, -2))
    seen = visible(B, L, T, starts, causal, q_offset, window, q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more score, whose value is zero
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(B, HQ, L, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :T]
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)  # a query that sees no key
    return weighted(weights, values, seen).to(q.dtype)


def weighted(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """weights @ values, where a value that is not finite spoils the queries that see it and no others."""
    finite = values.isfinite().all(-1)
    spoilt = (seen & ~finite[:, :, None]).any(-1)
    result = weights @ torch.where(finite[..., None], values, 0.0)
    return torch.where(spoilt[..., None], torch.nan, result)


def visible(
    B: int,
    L: int,
    T: int,
    starts: Tensor | None,
    causal: bool,
    q_offset: int | None,
    window: int,
    device: torch.device,
) -> Tensor:
    """Which keys each query sees: [B, 1, L, T] of bool. Query i has position q_offset + i, by default the last L
    of T; row b's first starts[b] keys are padding; a window holds the query's own position and those just before it."""
    keys = torch.arange(T, device=device)
    queries = torch.arange(L, device=device)[:, None] + (T - L if q_offset is None else q_offset)
    seen = torch.ones(B, 1, L, T, dtype=torch.bool, device=device)
    if causal:
        seen &= keys <= queries
    if window > 0:
        seen &= keys > queries - window
    if starts is not None:
        seen &= keys >= starts.to(device)[:, None, None, None]
    return seen
