"""Codecs, caches and calls for the tests of the AURA ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.aura import codebooks

OPS = ("aura_encode", "aura_encode_", "aura_decode", "aura_rotate", "aura_flash_p1", "aura_flash_p2", "aura_attention")
HEAD_SIZES = (64, 80, 96, 128, 256, 512)
BITS = (2, 3, 4, 8)
# Each size with two numbers of bits, each number with three sizes.
CODECS = [(D, BITS[(i + shift) % 4]) for shift in (0, 2) for i, D in enumerate(HEAD_SIZES)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Codec:
    """Signs and the default table."""

    D: int
    bits: int
    seed: int = 3

    def __post_init__(self) -> None:
        self.signs = reference.aura_signs(self.D, self.seed)
        self.codebook = codebooks.codebook(self.bits, self.D)
        self.boundaries = codebooks.boundaries(self.codebook)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of aura_encode."""
        return self.signs, self.boundaries, self.codebook

    @property
    def words(self) -> int:
        return (self.D * self.bits + 31) // 32

    def to(self, device: torch.device) -> Codec:
        there = Codec(self.D, self.bits, self.seed)
        there.signs, there.boundaries, there.codebook = (x.to(device) for x in self.tables)
        return there


def poisoned_cache(codec: Codec, B: int, HK: int, S: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, norms and means of a cache with sentinel content; heads and slots not in order."""
    codes = torch.full((B, S, HK, codec.words), 0x5A5A5A5A, dtype=torch.int32, device=device).transpose(1, 2)
    norms, means = (torch.full((HK, B, S), torch.nan, device=device).transpose(0, 1) for _ in range(2))
    return codes, norms, means


@dataclass
class Cache:
    """Encoded keys and values, [B, HK, T, ..] on the CPU, as slices of a cache of greater capacity."""

    key: Codec
    value: Codec
    keys: tuple[Tensor, Tensor, Tensor]  # codes, norms, means
    values: tuple[Tensor, Tensor, Tensor]

    def means(self, with_means: bool) -> dict[str, Tensor]:
        return {"key_means": self.keys[2], "value_means": self.values[2]} if with_means else {}

    def parts(self, with_signs: bool) -> dict[str, Tensor]:
        """By the ops' names."""
        found: dict[str, Any] = {}
        for name, codec, (codes, norms, _) in (("key", self.key, self.keys), ("value", self.value, self.values)):
            found |= {f"{name}_codes": codes, f"{name}_norms": norms, f"{name}_codebook": codec.codebook}
            if with_signs:
                found[f"{name}_signs"] = codec.signs
        return found


def make_cache(key: Codec, value: Codec, B: int, HK: int, T: int, with_means: bool = False, slack: int = 3) -> Cache:
    encoded: list[Any] = []
    for codec in (key, value):
        x = torch.randn(B, HK, T, codec.D) * torch.randn(B, HK, T, 1).mul(0.3).exp() + 0.2
        cache = poisoned_cache(codec, B, HK, T + slack, torch.device("cpu"))
        parts = reference.aura_encode(x, *codec.tables, with_means=with_means)
        for whole, part in zip(cache, parts[: 3 if with_means else 2], strict=False):
            whole[:, :, :T] = part
        encoded.append(tuple(part[:, :, :T] for part in cache))
    return Cache(key, value, *encoded)


def there(call: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The call on a device; tensors keep their strides and the data between their elements."""
    return {name: moved(value, device) if isinstance(value, Tensor) else value for name, value in call.items()}


def moved(x: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    if x.is_contiguous():
        return x.to(device, copy=copy)
    whole = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)
    return whole.to(device, copy=copy).as_strided(x.shape, x.stride(), x.storage_offset())


def valid_call(op: str, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of torch.ops.gdn.<op>: B 2, HK 2, D 64, 3 bits; 5 tokens in 8 slots, 3 queries, 20 keys."""
    codec = Codec(64, 3)
    x = torch.randn(2, 2, 5, codec.D)
    tables = {"signs": codec.signs, "boundaries": codec.boundaries, "codebook": codec.codebook}
    codes, norms, means = reference.aura_encode(x, *codec.tables, with_means=True)
    cache = {"codes": torch.zeros(2, 2, 8, codec.words, dtype=torch.int32)}
    cache |= {"norms": torch.zeros(2, 2, 8), "means": torch.zeros(2, 2, 8)}
    q, cached = torch.randn(2, 4, 3, codec.D), make_cache(codec, Codec(64, 4, 4), 2, 2, 20, with_means=True)
    masks = {"starts": torch.tensor([0, 2]), "window": 9, "block_size": 16}
    calls: dict[str, dict[str, Any]] = {
        "aura_encode": {"x": x} | tables | {"with_means": True},
        "aura_encode_": {"x": x, "slots": torch.arange(5)} | tables | cache,
        "aura_decode": {"codes": codes, "norms": norms, "codebook": codec.codebook, "signs": codec.signs}
        | {"means": means, "dtype": torch.bfloat16},
        "aura_rotate": {"x": x, "signs": codec.signs, "scale": 0.5},
        "aura_flash_p1": {"q_rot": q} | cached.parts(False) | cached.means(True) | {"q_sums": q.sum(-1)} | masks,
        "aura_flash_p2": {
            "o_partials": torch.randn(2, 4, 3, 2, codec.D),
            "m_partials": torch.randn(2, 4, 3, 2),
            "l_partials": torch.rand(2, 4, 3, 2) + 1,
            "value_signs": codec.signs,
            "mean_partials": torch.randn(2, 4, 3, 2),
            "sinks": torch.randn(4),
            "dtype": torch.float16,
        },
        "aura_attention": {"q": q}
        | cached.parts(True)
        | cached.means(True)
        | masks
        | {"sinks": torch.randn(4), "length": 18},
    }
    return there(calls[op], device)
