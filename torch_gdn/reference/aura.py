"""Keys and values as codes: rotation, encoding, decoding, and attention to them."""

import torch
from torch import Tensor

from torch_gdn.reference import trellis
from torch_gdn.reference.common import compute_dtype

__all__ = [
    "aura_attention",
    "aura_decode",
    "aura_encode",
    "aura_flash_p1",
    "aura_flash_p2",
    "aura_rotate",
    "aura_signs",
]


MASK = 2**64 - 1
TILE = 128  # slots of a cache that share a mean of each channel: 0 .. 127, and so on


def aura_signs(D: int, seed: int) -> Tensor:
    """D signs, float32: the top bit of SplitMix64's draws (Steele, Lea, Flood 2014), set for -1."""
    signs, state = [], seed & MASK
    for _ in range(D):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        signs.append(-1.0 if z >> 63 else 1.0)
    return torch.tensor(signs)


def hadamard(D: int) -> Tensor:
    """A matrix H [D, D], float64, of ones and minus ones with H H^T = D I, for D = m 2^k with m in {1, 12, 20}.

    It is the Kronecker product of H_m with Sylvester's matrix of size 2^k: symmetric for m = 1 alone.
    """
    odd = D // (D & -D) if D > 0 else 0
    m = {1: 1, 3: 12, 5: 20}.get(odd, 0)
    if m == 0 or D % m != 0:
        raise ValueError(f"hadamard: D: expected m 2^k with m 1, 12 or 20, got {D}")
    H = paley(m - 1) if m > 1 else torch.ones(1, 1, dtype=torch.float64)
    for _ in range((D // m).bit_length() - 1):
        H = torch.kron(H, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return H


def paley(q: int) -> Tensor:
    """Paley's first construction (1933) of size q + 1, for a prime q = 3 (mod 4): 1 on the diagonal, skew elsewhere."""
    residues = {n * n % q for n in range(1, q)}
    H = torch.ones(q + 1, q + 1, dtype=torch.float64)
    H[1:, 0] = -1
    for i in range(q):
        for j in range(q):
            H[i + 1, j + 1] = 1 if i == j or (j - i) % q in residues else -1
    return H


def rotation(signs: Tensor) -> Tensor:
    """Pi = H diag(signs) / sqrt(D), float64 [D, D]: orthogonal."""
    D = signs.shape[0]
    return hadamard(D).to(signs.device) * signs.double() / D**0.5


def aura_rotate(x: Tensor, signs: Tensor, scale: float = 1.0, inverse: bool = False) -> Tensor:
    """scale * Pi x, or scale * Pi^T x, over the last dimension."""
    dtype = compute_dtype(x)
    Pi = rotation(signs).to(dtype)
    return scale * (x.to(dtype) @ (Pi if inverse else Pi.T))


def aura_encode(x: Tensor, signs: Tensor, boundaries: Tensor | None, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors x [.., D] as codes [.., W] int32, and norms [..] in x's dtype, at least float32.

    The norm is that of x over that of its centroids, so that decoding gives back the norm of x. Codes of a vector that
    is not finite, or whose norm is not, are 0, and its norm says so. Without boundaries the codebook is a trellis's.
    """
    dtype = compute_dtype(x)
    x, codebook = x.to(dtype), codebook.to(dtype)
    r = x.norm(dim=-1)
    direction = torch.where((r > 0)[..., None], x / r[..., None], 0.0)
    y = torch.where(r.isfinite()[..., None], aura_rotate(direction, signs), 0.0)
    bits = bits_of(codebook)
    if boundaries is None:
        indices = trellis.nearest_windows(y.flatten(0, -2), codebook.flatten(), bits).reshape(y.shape)
    else:
        indices = quantise(y, boundaries.to(dtype))
    indices = torch.where(r.isfinite()[..., None], indices, 0)
    norms = r / codebook.flatten()[indices].norm(dim=-1)
    return pack(indices % 2**bits, bits, closed=boundaries is None), norms


def bits_of(codebook: Tensor) -> int:
    """The bits of a code. A codebook [2^bits] has its centroid; one of a trellis, [2^bits, 2^(L - bits)], has the label
    of each window of L bits, row by row."""
    return codebook.shape[0].bit_length() - 1


def quantise(y: Tensor, boundaries: Tensor) -> Tensor:
    """For each coordinate the number of boundaries below it: its centroid's index."""
    return torch.searchsorted(boundaries, y.contiguous())


def pack(indices: Tensor, bits: int, closed: bool = False) -> Tensor:
    """Indices [.., D] as a little-endian stream of D * bits bits in ceil(D * bits / 32) words, int32. The rest of the
    last word has zeros, or the stream's first bits if it is `closed`."""
    D = indices.shape[-1]
    words = (D * bits + 31) // 32
    stream = (indices[..., None] >> torch.arange(bits, device=indices.device) & 1).flatten(-2)
    rest = words * 32 - D * bits
    first = stream[..., :rest] if closed else torch.zeros_like(stream[..., :rest])
    stream = torch.cat([stream, first], -1).unflatten(-1, (words, 32))
    unsigned = (stream << torch.arange(32, device=indices.device)).sum(-1)
    return torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).int()


def aura_decode(
    codes: Tensor, norms: Tensor, codebook: Tensor, signs: Tensor, rotated: bool = False,
    dtype: torch.dtype | None = None, tile_means: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The vectors [.., D] that codes [.., W] and norms [..] encode, in `dtype` (float32), or Pi times them."""
    result = dtype or torch.float32
    computed = torch.promote_types(result, torch.promote_types(norms.dtype, torch.float32))
    D = signs.shape[0]
    y = norms.to(computed)[..., None] * codebook.to(computed).flatten()[entries(codes, codebook, D)]
    mean = y.new_zeros(D) if tile_means is None else means_of_tokens(tile_means, y.shape[-2]).to(computed)
    if rotated:
        return (y + aura_rotate(mean, signs)).to(result)
    return (aura_rotate(y, signs, inverse=True) + mean).to(result)


def means_of_tokens(tile_means: Tensor, tokens: int) -> Tensor:
    """Expands one value per tile, [B, H, tiles, ..], to one per token, [B, H, tokens, ..]. Tile i has slots 128 i to
    128 i + 127."""
    return tile_means.repeat_interleave(TILE, 2)[:, :, :tokens]


def entries(codes: Tensor, codebook: Tensor, D: int) -> Tensor:
    """Returns the index in the codebook of each of the D values of each row of codes."""
    bits = bits_of(codebook)
    if codebook.dim() == 1:
        return unpack(codes, bits, D)
    return trellis.windows(codes.contiguous().view(torch.uint8)[..., : D * bits // 8], codebook, bits)


def unpack(codes: Tensor, bits: int, D: int) -> Tensor:
    """The D indices of each stream of words [.., W] int32."""
    stream = (codes.long()[..., None] >> torch.arange(32, device=codes.device) & 1).flatten(-2)
    stream = stream[..., : D * bits].unflatten(-1, (D, bits))
    return (stream << torch.arange(bits, device=codes.device)).sum(-1)


def aura_attention(
    q: Tensor, key_codes: Tensor, key_norms: Tensor, key_codebook: Tensor, key_signs: Tensor, value_codes: Tensor,
    value_norms: Tensor, value_codebook: Tensor, value_signs: Tensor, starts: Tensor | None = None,
    sinks: Tensor | None = None, scale: float | None = None, causal: bool = True, q_offset: int | None = None,
    window: int = 0, block_size: int | None = None, length: int | None = None, exact_keys: Tensor | None = None,
    exact_values: Tensor | None = None, exact_sinks: int = 0, exact_length: int | None = None,
    key_tile_means: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q [B, HQ, L, D] to the decoded keys and values, all or the first `length` of them, with the exact
    rows around them: the definition. `block_size` is ignored."""
    dtype = compute_dtype(q)
    B, HQ, L, _ = q.shape
    ratio = HQ // key_codes.shape[1]
    keys = aura_decode(key_codes, key_norms, key_codebook, key_signs, dtype=dtype)[:, :, :length]
    if key_tile_means is not None:
        keys = keys + means_of_tokens(key_tile_means, keys.shape[2]).to(dtype)
    values = aura_decode(value_codes, value_norms, value_codebook, value_signs, dtype=dtype)[:, :, :length]
    if exact_keys is not None and exact_values is not None:
        keys, values = (
            torch.cat([exact[:, :, :exact_sinks].to(dtype), x, exact[:, :, exact_sinks:exact_length].to(dtype)], 2)
            for x, exact in ((keys, exact_keys), (values, exact_values))
        )
    keys, values = (x.repeat_interleave(ratio, dim=1) for x in (keys, values))
    seen = visible(B, L, keys.shape[2], starts, causal, q_offset, window, q.device)
    return attend(q, keys, values, seen, scale, sinks)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax attention of q [B, H, L, D] to keys and values [B, H, T, D]. A query that sees no key gives zeros."""
    dtype, D = compute_dtype(q), q.shape[-1]
    scores = (D**-0.5 if scale is None else scale) * (q.to(dtype) @ keys.to(dtype).transpose(-1, -2))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more score, whose value is zero
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1)[..., : keys.shape[2]], 0.0)
    return weighted(weights, values.to(dtype), seen).to(q.dtype)


def weighted(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """weights @ values, where a value that is not finite spoils the queries that see it and no others."""
    finite = values.isfinite().all(-1)
    spoilt = (seen & ~finite[:, :, None]).any(-1)
    result = weights @ torch.where(finite[..., None], values, 0.0)
    return torch.where(spoilt[..., None], torch.nan, result)


def visible(
    B: int, L: int, T: int, starts: Tensor | None, causal: bool, q_offset: int | None, window: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Returns which keys each query sees, [B, 1, L, T] of bool. Query i has position q_offset + i; by default the
    queries are the last L of T positions. The first starts[b] keys of row b are padding. A window covers the query's
    own position and those just before it."""
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


def aura_flash_p1(
    q_rot: Tensor, key_codes: Tensor, key_norms: Tensor, key_codebook: Tensor, value_codes: Tensor, value_norms: Tensor,
    value_codebook: Tensor, starts: Tensor | None = None, causal: bool = True, q_offset: int | None = None,
    window: int = 0, block_size: int = 64, tile_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Softmax over each block of keys by itself, on codes, for q_rot [B, HQ, L, D] that is rotated and scaled.

    o_partials [B, HQ, L, NB, D] (not divided by l, in the values' rotated space), and the largest score m_partials and
    the sum of exponentials l_partials [B, HQ, L, NB].
    """
    dtype = compute_dtype(q_rot)
    B, HQ, L, D = q_rot.shape
    T, ratio = key_codes.shape[2], HQ // key_codes.shape[1]

    def heads(x: Tensor) -> Tensor:
        return x.to(dtype).repeat_interleave(ratio, dim=1)

    def vectors(codes: Tensor, norms: Tensor, codebook: Tensor) -> Tensor:
        return heads(norms.to(dtype)[..., None] * codebook.to(dtype).flatten()[entries(codes, codebook, D)])

    keys, values = vectors(key_codes, key_norms, key_codebook), vectors(value_codes, value_norms, value_codebook)
    scores = q_rot.to(dtype) @ keys.transpose(-1, -2)
    if tile_scores is not None:
        scores = scores + tile_scores.to(dtype).repeat_interleave(TILE, 3)[..., :T]
    seen = visible(B, L, T, starts, causal, q_offset, window, q_rot.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    o, m, sums = [], [], []
    for first in range(0, T, block_size):
        block = slice(first, min(first + block_size, T))
        largest = scores[..., block].amax(-1)
        weights = torch.exp(scores[..., block] - largest.nan_to_num(neginf=0.0)[..., None])
        o.append(weighted(weights, values[:, :, block], seen[..., block]))
        m.append(largest)
        sums.append(weights.sum(-1))
    if T == 0:
        none = q_rot.new_empty(B, HQ, L, 0, dtype=dtype)
        return none[..., None].expand(B, HQ, L, 0, D), none, none
    return torch.stack(o, dim=3), torch.stack(m, dim=3), torch.stack(sums, dim=3)


def aura_flash_p2(
    o_partials: Tensor, m_partials: Tensor, l_partials: Tensor, value_signs: Tensor, sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The blocks of `aura_flash_p1` merged into one softmax, in the values' own space: [B, HQ, L, D]."""
    m = m_partials
    if sinks is not None:  # one more block, of a score alone
        m = torch.cat([m, sinks.to(m.dtype)[:, None, None].expand(*m.shape[:3], 1)], dim=-1)
    largest = m.amax(-1, keepdim=True) if m.shape[-1] else m.new_zeros(*m.shape[:3], 1)
    factors = torch.exp(m - largest.nan_to_num(neginf=0.0))
    blocks = factors[..., : m_partials.shape[-1]]
    total = (blocks * l_partials).sum(-1, keepdim=True) + factors[..., m_partials.shape[-1] :].sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)  # no key was seen: 0
    o = aura_rotate((blocks[..., None] * o_partials).sum(3) / total, value_signs, inverse=True)
    return o.to(dtype or torch.float32)
