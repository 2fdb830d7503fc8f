"""Tests AURA's references: the packed layout by hand, the algebra of the rotation, and attention against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.aura import codebooks
from torch_gdn.reference.aura import hadamard, pack, quantise, rotation, unpack

SIZES = (64, 80, 96, 128, 256, 512)
EXACT = 1e-12


def words(*unsigned: int) -> Tensor:
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in unsigned], dtype=torch.int32)


# These words were packed by hand. Code d has bits [d * bits, (d + 1) * bits) of a stream that begins at the lowest bit.
PACKED = [
    (2, [1, 2, 3, 0, *[0] * 12, 2], words(0b00_11_10_01, 0b10)),  # code 16 starts word 1
    (3, [0] * 10 + [0b110, 0b101], words(0b10 << 30, 0b1 | 0b101 << 1)),  # code 10: two bits in word 0, one in word 1
    (3, [0] * 21 + [0b011], words(0, 0b1 << 31, 0b01)),  # code 21: one bit in word 1, two in word 2
    (3, [7] * 11, words(0xFFFFFFFF, 0b1)),
    (4, [1, 2, 3, 4, 5, 6, 7, 8, 9], words(0x87654321, 9)),
    (8, [0x01, 0x02, 0x03, 0xFF, 0x80], words(0xFF030201, 0x80)),
]


@pytest.mark.parametrize(("bits", "indices", "packed"), PACKED)
def test_packed_layout(bits: int, indices: list[int], packed: Tensor) -> None:
    assert torch.equal(pack(torch.tensor(indices), bits), packed)
    assert unpack(packed, bits, len(indices)).tolist() == indices


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("D", SIZES)
def test_packing_and_back(D: int, bits: int) -> None:
    indices = torch.randint(0, 2**bits, (3, 5, D))
    packed = pack(indices, bits)
    assert packed.shape == (3, 5, -(-D * bits // 32)) and packed.dtype == torch.int32
    assert torch.equal(unpack(packed, bits, D), indices)


@pytest.mark.parametrize("D", [1, 2, 8, 12, 20, 24, *SIZES])
def test_hadamard_matrix(D: int) -> None:
    H = hadamard(D)
    assert torch.equal(H.abs(), torch.ones_like(H))
    assert torch.equal(H @ H.T, D * torch.eye(D, dtype=torch.float64))


@pytest.mark.parametrize("D", [0, 3, 5, 6, 10, 36, 100, 112])
def test_sizes_without_a_hadamard_matrix(D: int) -> None:
    with pytest.raises(ValueError, match=f"expected m 2\\^k with m 1, 12 or 20, got {D}"):
        hadamard(D)


def test_hadamard_matrix_of_order_12_by_hand() -> None:
    """Row 2 of Paley's matrix is -1, then 1 if j - 1 is 0 or a square modulo 11 (1, 3, 4, 5, 9), and -1 otherwise."""
    row = hadamard(12)[2]
    expected = [-1] + [1 if (j - 1) % 11 in (0, 1, 3, 4, 5, 9) else -1 for j in range(11)]
    assert row.tolist() == expected


@pytest.mark.parametrize("D", SIZES)
def test_rotation_is_orthogonal_and_undone(D: int) -> None:
    signs = reference.aura_signs(D, 7)
    Pi = rotation(signs)
    identity = torch.eye(D, dtype=torch.float64)
    assert (Pi @ Pi.T - identity).abs().max() < EXACT
    x = torch.randn(3, D, dtype=torch.float64)
    rotated = reference.aura_rotate(x, signs, scale=2.0)
    assert (rotated - 2 * x @ Pi.T).abs().max() < EXACT
    assert (reference.aura_rotate(rotated, signs, scale=0.5, inverse=True) - x).abs().max() < EXACT


def test_rotation_is_signs_then_hadamard() -> None:
    """For D = 2, the result by hand is (x0 s0 + x1 s1, x0 s0 - x1 s1) / sqrt(2)."""
    y = reference.aura_rotate(torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, -1.0]))
    assert y.tolist() == pytest.approx([-1 / 2**0.5, 7 / 2**0.5])


def test_signs_are_those_of_splitmix64() -> None:
    """Rosetta Code publishes the first numbers for seed 1234567."""
    draws = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert reference.aura_signs(5, 1234567).tolist() == [-1.0 if draw >> 63 else 1.0 for draw in draws]
    both = torch.cat([reference.aura_signs(512, seed) for seed in range(8)])
    assert abs(both.mean().item()) < 0.05  # 3.2 standard deviations
    assert not torch.equal(reference.aura_signs(64, 0), reference.aura_signs(64, 1))


def test_a_coordinate_on_a_boundary_belongs_below() -> None:
    boundaries = torch.tensor([-1.0, 0.0, 1.0])
    assert quantise(torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]), boundaries).tolist() == [0, 0, 1, 1, 2, 2, 3]


def encoded(x: Tensor, bits: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    D = x.shape[-1]
    centroids, signs = codebooks.codebook(bits, D), reference.aura_signs(D, bits)
    return reference.aura_encode(x, signs, codebooks.boundaries(centroids), centroids), centroids, signs


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("D", [80, 128])
def test_decoding_keeps_the_norm_and_nearly_the_direction(D: int, bits: int) -> None:
    x = 3 * torch.randn(50, D, dtype=torch.float64)
    (codes, norms), centroids, signs = encoded(x, bits)
    decoded = reference.aura_decode(codes, norms, centroids, signs, dtype=torch.float64)
    assert (decoded.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max() < EXACT
    error = (decoded - x).norm() / x.norm()
    assert error < {2: 0.36, 3: 0.20, 4: 0.105, 8: 0.0075}[bits]
    rotated = reference.aura_decode(codes, norms, centroids, signs, rotated=True, dtype=torch.float64)
    assert (rotated - reference.aura_rotate(decoded, signs)).abs().max() < EXACT


def test_the_means_of_tiles_are_added() -> None:
    x, means = torch.randn(1, 2, 140, 64, dtype=torch.float64), torch.randn(1, 2, 2, 64, dtype=torch.float64)
    (codes, norms), centroids, signs = encoded(x, 4)
    without = reference.aura_decode(codes, norms, centroids, signs, dtype=torch.float64)
    decoded = reference.aura_decode(codes, norms, centroids, signs, dtype=torch.float64, tile_means=means)
    for first, last, tile in ((0, 128, 0), (128, 140, 1)):
        added = decoded[:, :, first:last] - without[:, :, first:last]
        assert (added - means[:, :, tile : tile + 1]).abs().max() < EXACT
    rotated = reference.aura_decode(codes, norms, centroids, signs, True, torch.float64, means)
    assert (rotated - reference.aura_rotate(decoded, signs)).abs().max() < EXACT


def test_vectors_that_are_zero_or_not_finite() -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    alone = encoded(x, 3)[0]
    x[1], x[2, 5], x[3, 6] = 0, torch.inf, torch.nan
    (codes, norms), centroids, signs = encoded(x, 3)
    assert torch.equal(codes[0], alone[0][0]) and norms[0] == alone[1][0]
    assert norms[1] == 0 and norms[2] == torch.inf and norms[3].isnan()
    assert not codes[2:].any()
    assert not reference.aura_decode(codes[1], norms[1], centroids, signs).any()


def a_cache(T: int, HK: int, D: int = 64) -> dict[str, Tensor]:
    k, v = torch.randn(2, HK, T, D, dtype=torch.float64), torch.randn(2, HK, T, D, dtype=torch.float64)
    (codes, norms), centroids, signs = encoded(k, 4)
    keys = {"key_codes": codes, "key_norms": norms, "key_codebook": centroids, "key_signs": signs}
    (codes, norms), centroids, signs = encoded(v, 3)
    values = {"value_codes": codes, "value_norms": norms, "value_codebook": centroids, "value_signs": signs}
    return keys | values


def decoded(cache: dict, name: str) -> Tensor:
    parts = (cache[f"{name}_{part}"] for part in ("codes", "norms", "codebook", "signs"))
    return reference.aura_decode(*parts, dtype=torch.float64)


@pytest.mark.parametrize(("L", "causal", "window"), [(1, True, 0), (7, True, 0), (7, True, 5), (3, False, 0)])
def test_attention_is_pytorchs_on_what_is_decoded(L: int, causal: bool, window: int) -> None:
    T, starts = 23, torch.tensor([0, 4])
    cache = a_cache(T, HK=2)
    q = torch.randn(2, 6, L, 64, dtype=torch.float64)
    mask = torch.zeros(2, 1, L, T, dtype=torch.bool)
    for b in range(2):
        for i in range(L):
            for j in range(T):
                position = T - L + i
                inside = j <= position if causal else True
                mask[b, 0, i, j] = inside and j >= starts[b] and (window == 0 or j > position - window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, decoded(cache, "key"), decoded(cache, "value"), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    o = reference.aura_attention(q, **cache, starts=starts, scale=0.3, causal=causal, window=window)
    assert (o - expected).abs().max() < EXACT


def test_a_sink_takes_its_share() -> None:
    """If the sink's logit equals the score of the only key, the output is halved. Queries that see only padding give
    zeros."""
    cache = a_cache(1, HK=1)
    q = torch.randn(2, 1, 1, 64, dtype=torch.float64)
    scores = 0.125 * (q * decoded(cache, "key")).sum(-1)
    o = reference.aura_attention(q[:1], **{n: x[:1] if n.endswith(("codes", "norms")) else x for n, x in cache.items()},
                                 sinks=scores[0].flatten())  # fmt: skip
    assert (o - decoded(cache, "value")[:1] / 2).abs().max() < EXACT
    unseen = reference.aura_attention(q, **cache, starts=torch.tensor([1, 1]), sinks=scores[0].flatten())
    assert torch.equal(unseen, torch.zeros_like(unseen))


@pytest.mark.parametrize("with_means", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("T", "window", "block_size"), [(37, 0, 16), (137, 10, 16), (16, 0, 64), (0, 0, 16)])
def test_two_passes_are_attention(T: int, window: int, block_size: int, sinks: bool, with_means: bool) -> None:
    cache = a_cache(T, HK=2)
    q = torch.randn(2, 4, min(T, 5), 64, dtype=torch.float64)
    options = {"starts": torch.tensor([0, min(T, 35)]), "window": window}
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    means = torch.randn(2, 2, -(-T // 128), 64).half() if with_means else None
    expected = reference.aura_attention(q, **cache, **options, sinks=logits, key_tile_means=means)
    key_signs, value_signs = cache.pop("key_signs"), cache.pop("value_signs")
    if means is not None:
        options["tile_scores"] = 0.125 * (q @ means.repeat_interleave(2, 1).double().transpose(-1, -2))
    q_rot = reference.aura_rotate(q, key_signs, 0.125)
    partials = reference.aura_flash_p1(q_rot, **cache, **options, block_size=block_size)
    assert partials[1].shape == (2, 4, q.shape[2], -(-T // block_size))
    o = reference.aura_flash_p2(*partials, value_signs, logits, dtype=torch.float64)
    assert o.shape == expected.shape
    assert (o - expected).abs().sum() < EXACT * (o.numel() + 1)


def test_a_value_that_is_not_finite_spoils_those_who_see_it_alone() -> None:
    cache = a_cache(9, HK=1)
    q = torch.randn(2, 1, 9, 64, dtype=torch.float64)
    clean = reference.aura_attention(q, **cache)
    norms = cache["value_norms"].clone()
    norms[0, 0, 4] = torch.nan
    o = reference.aura_attention(q, **cache | {"value_norms": norms})
    assert torch.equal(o[:, :, :4], clean[:, :, :4]) and torch.equal(o[1], clean[1])
    assert o[0, :, 4:].isnan().all()
