from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from torch_gdn.aura.codebooks import BITS, TABLES, require


@dataclass(frozen=True)
class Scheme:
    """How many bits a key's and a value's coordinates get, and by which tables.

    Keys want more bits than values: an error in a key is an error in an exponent. "8v4" is the safe choice, "4v4" half
    as large again for a model that bears it; with 2 bits test the model first. Besides the codes each vector has a norm
    of 2 bytes. Of the size of float16, with 128 values a head: 8v8 1/1.97, 8v4 1/2.61, 4v4 1/3.88, 4v2 and 3v3 1/5.12,
    2v2 1/7.53.

    Args:
        name: "<bits of keys>v<bits of values>", each 2, 3, 4 or 8. Default: "8v4".
        table: which codebooks (`torch_gdn.aura.codebooks`). Default: "lloyd-max".
        means: whether each vector's mean is taken out first and kept beside it, at 4 bytes more: for models whose keys
            have a large common part, as those with biases in their projections do. Default: False.

    Raises:
        ValueError: a name or table that is not one of those.

    Example:
        >>> from torch_gdn.aura import Scheme
        >>> scheme = Scheme("4v2")
        >>> scheme.key_bits, scheme.value_bits, scheme.bytes_per_token(128)
        (4, 2, 100)
        >>> round(Scheme().ratio(128), 2)
        2.61
    """

    name: str = "8v4"
    table: str = "lloyd-max"
    means: bool = False
    key_bits: int = field(init=False, repr=False)
    value_bits: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        allowed = "".join(map(str, BITS))
        match = re.fullmatch(f"([{allowed}])v([{allowed}])", str(self.name))
        if match is None:
            raise ValueError(f"Scheme: name: expected '<bits>v<bits>' with bits 2, 3, 4 or 8, got {self.name!r}")
        require("Scheme: table", self.table, TABLES)
        for argument, bits in zip(("key_bits", "value_bits"), match.groups(), strict=True):
            object.__setattr__(self, argument, int(bits))

    def bytes_per_token(self, head_dim: int) -> int:
        """What a token's key and value take in one head: codes, norms (float16) and means (float32)."""
        words = sum((head_dim * bits + 31) // 32 for bits in (self.key_bits, self.value_bits))
        return 4 * words + (12 if self.means else 4)

    def ratio(self, head_dim: int, dtype: torch.dtype = torch.float16) -> float:
        """How many times smaller than keys and values in `dtype`."""
        return 2 * head_dim * dtype.itemsize / self.bytes_per_token(head_dim)
