from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from torch_gdn.aura.codebooks import BITS, TABLES, WINDOW, codebook
from torch_gdn.aura.tables import require
from torch_gdn.aura.trellis import RATES


def names() -> list[str]:
    """Returns the names of all schemes."""
    plain = [f"{keys}v{values}" for keys, values in product(BITS, BITS)]
    return plain + [f"{name}t" for name in plain if any(bits in RATES[WINDOW] for bits in (int(name[0]), int(name[2])))]


@dataclass(frozen=True)
class Scheme:
    """Says how many bits each coordinate of a key and of a value gets, and which tables code them.

    Give keys at least as many bits as values, because softmax amplifies errors in keys. "8v4t" is the safe choice.
    "4v4t" takes two thirds of its memory. Test your model before you use 2 bits. Each vector has its codes and a norm
    of 2 bytes. With 128 values per head, 8v8 takes 1/1.97 of float16's memory, 8v4 1/2.61, 4v4 1/3.88, 4v2 and 3v3
    1/5.12, and 2v2 1/7.53. Means of tiles add 2 bytes per key value and 128 tokens.

    Args:
        name: "<bits of keys>v<bits of values>", each 2, 3, 4, 5 or 8. With a "t" at the end, as in "4v4t", codes of
            2, 3 and 4 bits are trellis codes: they lose less in the same memory, and encoding takes longer. Default:
            "4v4t".
        table: the codebooks of codes without a trellis (`torch_gdn.aura.codebooks`), "lloyd-max" or "origin".
            Default: "lloyd-max".

    Raises:
        ValueError: If a name or table is not one of these.

    Example:
        >>> from torch_gdn.aura import Scheme
        >>> scheme = Scheme("4v2")
        >>> scheme.key_bits, scheme.value_bits, scheme.bytes_per_token(128)
        (4, 2, 100)
        >>> round(Scheme().ratio(128), 2)
        3.88
    """

    name: str = "4v4t"
    table: str = "lloyd-max"
    key_bits: int = field(init=False, repr=False)
    value_bits: int = field(init=False, repr=False)
    trellis: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.name not in names():
            expected = "expected '<bits>v<bits>' with bits 2, 3, 4, 5 or 8, or with a 't' behind if one is at most 4"
            raise ValueError(f"Scheme: name: {expected}, got {self.name!r}")
        require("Scheme: table", self.table, TABLES)
        result = {"key_bits": int(self.name[0]), "value_bits": int(self.name[2]), "trellis": self.name.endswith("t")}
        for argument, value in result.items():
            object.__setattr__(self, argument, value)
        if self.table == "origin" and (self.trellis or 5 in (self.key_bits, self.value_bits)):
            raise ValueError(
                f"Scheme: table: expected 'lloyd-max' for {self.name!r}, got 'origin', which has no such code"
            )

    def codebooks(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """Returns the codebooks of keys and of values (`torch_gdn.aura.codebooks`)."""

        def of(bits: int) -> Tensor:
            return codebook(bits, head_dim, "trellis" if self.trellis and bits in RATES[WINDOW] else self.table)

        return of(self.key_bits), of(self.value_bits)

    def bytes_per_token(self, head_dim: int) -> int:
        """Returns the bytes of a token's key and value in one head: codes, and norms in float16."""
        words = sum((head_dim * bits + 31) // 32 for bits in (self.key_bits, self.value_bits))
        return 4 * words + 4

    def ratio(self, head_dim: int, dtype: torch.dtype = torch.float16) -> float:
        """Returns how many times smaller it is than keys and values in `dtype`."""
        return 2 * head_dim * dtype.itemsize / self.bytes_per_token(head_dim)
