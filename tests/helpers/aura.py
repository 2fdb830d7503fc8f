"""Codecs, caches and calls for the tests of the AURA ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn.aura import codebooks

OPS = ("aura_encode", "aura_encode_", "aura_decode", "aura_rotate")
HEAD_SIZES = (64, 80, 96, 128, 256, 512)
BITS = (2, 3, 4, 8)
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
        """What aura_encode takes."""
        return self.signs, self.boundaries, self.codebook

    @property
    def words(self) -> int:
        return (self.D * self.bits + 31) // 32

    def to(self, device: torch.device) -> Codec:
        there = Codec(self.D, self.bits, self.seed)
        there.signs, there.boundaries, there.codebook = (x.to(device) for x in self.tables)
        return there


def poisoned_cache(codec: Codec, B: int, HK: int, S: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, norms and means of a cache whose slots hold what a test would notice, heads and slots not in order."""
    codes = torch.full((B, S, HK, codec.words), 0x5A5A5A5A, dtype=torch.int32, device=device).transpose(1, 2)
    norms, means = (torch.full((HK, B, S), torch.nan, device=device).transpose(0, 1) for _ in range(2))
    return codes, norms, means


def valid_call(op: str, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of torch.ops.gdn.<op>: B 2, HK 2, T 5, D 64, 3 bits, a cache of 8 slots."""
    codec = Codec(64, 3)
    x = torch.randn(2, 2, 5, codec.D)
    tables = {"signs": codec.signs, "boundaries": codec.boundaries, "codebook": codec.codebook}
    codes, norms, means = reference.aura_encode(x, *codec.tables, with_means=True)
    cache = {"codes": torch.zeros(2, 2, 8, codec.words, dtype=torch.int32)}
    cache |= {"norms": torch.zeros(2, 2, 8), "means": torch.zeros(2, 2, 8)}
    calls: dict[str, dict[str, Any]] = {
        "aura_encode": {"x": x} | tables | {"with_means": True},
        "aura_encode_": {"x": x, "slots": torch.arange(5)} | tables | cache,
        "aura_decode": {"codes": codes, "norms": norms, "codebook": codec.codebook, "signs": codec.signs}
        | {"means": means, "dtype": torch.bfloat16},
        "aura_rotate": {"x": x, "signs": codec.signs, "scale": 0.5},
    }
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in calls[op].items()}
