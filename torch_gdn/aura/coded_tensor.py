from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.aura.codebooks import boundaries

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the vectors that are coded
OF_TOKENS = ("codes", "norms", "means")  # [B, HK, capacity, ..] each; means may be absent
TABLES = ("codebook", "boundaries", "signs")


def dtype_name(dtype: object) -> str:
    """As the ops' errors have it: bfloat16."""
    return str(dtype).removeprefix("torch.")


class CodedTensor:
    """The keys of a cache, or its values: codes [B, HK, S, W], norms and perhaps means [B, HK, S], and their tables."""

    def __init__(self, bits: int, signs: Tensor, codebook: Tensor, means: bool, shape: tuple[int, int, int]) -> None:
        device = signs.device
        self.signs, self.codebook = signs, codebook
        between = boundaries(codebook.cpu())
        self.boundaries = None if between is None else between.to(device)
        words = (signs.shape[0] * bits + 31) // 32
        self.codes = torch.zeros(*shape, words, dtype=torch.int32, device=device)
        self.norms = torch.zeros(shape, dtype=torch.float16, device=device)
        self.means = torch.zeros(shape, device=device) if means else None

    def filled(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the first `length` tokens. An index of slices would take twice as long as `narrow`."""
        means = None if self.means is None else self.means.narrow(2, 0, length)
        return self.codes.narrow(2, 0, length), self.norms.narrow(2, 0, length), means

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """What codes are decoded by: codebook and signs."""
        return self.codebook, self.signs

    def of_tokens(self) -> dict[str, Tensor]:
        return {name: x for name in OF_TOKENS if (x := getattr(self, name)) is not None}

    def parts(self, length: int) -> dict[str, Tensor]:
        """All that it takes to read the first `length` tokens."""
        tokens = {name: x[:, :, :length] for name, x in self.of_tokens().items()}
        return tokens | self.tables_of_file()

    def tables_of_file(self) -> dict[str, Tensor]:
        return {name: x for name in TABLES if (x := getattr(self, name)) is not None}

    def fill(self, parts: dict[str, Tensor]) -> None:
        """Takes over such parts, whose tokens become the first ones."""
        for name, x in self.of_tokens().items():
            x[:, :, : parts[name].shape[2]] = parts[name].to(x.device)
        for name in self.tables_of_file():
            setattr(self, name, parts[name].to(self.norms.device))

    def append(self, x: Tensor, slots: Tensor) -> None:
        torch.ops.gdn.aura_encode_(
            x, slots, self.signs, self.boundaries, self.codebook, self.codes, self.norms, self.means
        )

    def decoded(self, length: int, dtype: torch.dtype) -> Tensor:
        codes, norms, means = self.filled(length)
        return torch.ops.gdn.aura_decode(codes, norms, self.codebook, self.signs, means, False, dtype)

    def resize(self, capacity: int, start: int, end: int) -> None:
        """Memory for `capacity` tokens, the first of which are those from start to end."""
        for name, x in self.of_tokens().items():
            other = x.new_zeros(*x.shape[:2], capacity, *x.shape[3:])
            other[:, :, : end - start] = x[:, :, start:end]
            setattr(self, name, other)

    def select(self, rows: Tensor) -> None:
        for name, x in self.of_tokens().items():
            setattr(self, name, x.index_select(0, rows))
