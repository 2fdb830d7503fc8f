import torch
from torch import Tensor

from torch_gdn.aura.codebooks import boundaries
from torch_gdn.reference.attention import LEAST_KEYS
from torch_gdn.reference.aura import TILE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of vectors before coding
OF_TOKENS = ("codes", "norms", "tile_means")  # [B, HK, capacity, ..] each; caches may lack the last one
TABLES = ("codebook", "boundaries", "signs")


def dtype_name(dtype: object) -> str:
    """Returns the dtype's name as the ops' errors have it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def has_tile_means(tail: int) -> bool:
    """Returns whether the keys of a cache have means of tiles. With such a tail, at least 32 keys of a tile become
    codes together. That is enough for a mean."""
    return tail >= TILE or (tail > 0 and tail % LEAST_KEYS == 0)


def entries(name: str, tokens: int) -> int:
    """Returns how many entries one of OF_TOKENS has for `tokens` tokens."""
    return -(-tokens // TILE) if name == "tile_means" else tokens


def resized(x: Tensor, size: int, first: int, last: int) -> Tensor:
    """Returns new memory of `size` entries along dimension 2. It begins with x's entries from first to last."""
    result = x.new_zeros(*x.shape[:2], size, *x.shape[3:])
    result[:, :, : last - first] = x[:, :, first:last]
    return result


class CodedTensor:
    """The keys of a cache, or its values: codes [B, HK, S, W], norms [B, HK, S], and their tables.

    With `tile_means`, each tile of 128 slots has a vector that is subtracted before a vector becomes codes. It is the
    mean of the tokens that become codes together with the token in the tile's first slot. Later tokens of the tile use
    it unchanged. Any vector is right, because decoding adds it again.
    """

    def __init__(
        self, bits: int, signs: Tensor, codebook: Tensor, shape: tuple[int, int, int], tile_means: bool = False
    ) -> None:
        device = signs.device
        self.signs, self.codebook = signs, codebook
        between = boundaries(codebook.cpu())
        self.boundaries = None if between is None else between.to(device)
        words = (signs.shape[0] * bits + 31) // 32
        self.codes = torch.zeros(*shape, words, dtype=torch.int32, device=device)
        self.norms = torch.zeros(shape, dtype=torch.float16, device=device)
        tiles_shape = (*shape[:2], entries("tile_means", shape[2]), signs.shape[0])
        self.tile_means = torch.zeros(tiles_shape, dtype=torch.float16, device=device) if tile_means else None

    def filled(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first `length` tokens. An index of slices would take twice as long as `narrow`."""
        return self.codes.narrow(2, 0, length), self.norms.narrow(2, 0, length)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Returns what decodes codes: codebook and signs."""
        return self.codebook, self.signs

    def token_tensors(self) -> dict[str, Tensor]:
        return {name: x for name in OF_TOKENS if (x := getattr(self, name)) is not None}

    def parts(self, length: int) -> dict[str, Tensor]:
        """Returns everything that reading the first `length` tokens needs."""
        tokens = {name: x[:, :, : entries(name, length)] for name, x in self.token_tensors().items()}
        return tokens | self.tables_of_file()

    def tables_of_file(self) -> dict[str, Tensor]:
        return {name: x for name in TABLES if (x := getattr(self, name)) is not None}

    def fill(self, parts: dict[str, Tensor]) -> None:
        """Takes over such parts. Their tokens become the first ones."""
        for name, x in self.token_tensors().items():
            x[:, :, : parts[name].shape[2]] = parts[name].to(x.device)
        for name in self.tables_of_file():
            setattr(self, name, parts[name].to(self.norms.device))

    def append(self, x: Tensor, slots: Tensor, first: int) -> None:
        """Encodes x [B, HK, T, D] into these slots, which begin with `first`."""
        self._find_tile_means(x, first)
        tables = (self.signs, self.boundaries, self.codebook)
        torch.ops.gdn.aura_encode_(x, slots, *tables, self.codes, self.norms, self.tile_means)

    def _find_tile_means(self, x: Tensor, first: int) -> None:
        """Finds the means of the tiles whose first token is in x: of all whole tiles at once, and of the rest."""
        tokens, start = x.shape[2], -first % TILE
        if self.tile_means is None or start >= tokens:
            return
        rest = tokens - (tokens - start) % TILE
        for begin, end in ((start, rest), (rest, tokens)):
            if begin < end:
                tiles = x.narrow(2, begin, end - begin).unflatten(2, (-1, min(TILE, end - begin)))
                means = tiles.mean(3, dtype=torch.float32).half()
                target = self.tile_means.narrow(2, (first + begin) // TILE, means.shape[2])
                target.copy_(means.nan_to_num(0.0, 0.0, 0.0))  # a token that is not finite must not spoil others

    def decoded(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.ops.gdn.aura_decode(*self.filled(length), *self.tables, False, dtype, self.tile_means)

    def resize(self, capacity: int, start: int, end: int) -> None:
        """Takes memory for `capacity` tokens. Keeps those from start, where a tile begins, to end."""
        for name, x in self.token_tensors().items():
            setattr(self, name, resized(x, *(entries(name, tokens) for tokens in (capacity, start, end))))

    def select(self, rows: Tensor) -> None:
        for name, x in self.token_tensors().items():
            setattr(self, name, x.index_select(0, rows))
