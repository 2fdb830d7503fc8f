import torch
from torch import Tensor

from torch_gdn.aura.coded_tensor import resized
from torch_gdn.reference.aura import TILE


class ExactRows:
    """The first `sinks` tokens of a cache and its newest ones, in the model's dtype.

    At least the last `tail` tokens are here. Older ones leave a tile at a time to become codes, so there are up to
    `tail` and a tile of them. A tile has min(tail, 128) tokens.
    """

    def __init__(self, like: Tensor, sinks: int, tail: int, capacity: int) -> None:
        """`like` is an empty tensor [B, HK, 0, D] of the cache's dtype and device."""
        self.sinks, self.tail, self.tile = sinks, tail, min(tail, TILE)
        self.keys = self.values = like
        self.resize(capacity, 0, 0)

    def most(self, capacity: int) -> int:
        """Returns how many rows a cache of `capacity` tokens needs."""
        return min(capacity, self.sinks + self.tail + self.tile)

    def surplus(self, rows: int) -> int:
        """Returns how many of `rows` rows must become codes."""
        over = rows - self.sinks - self.tail - self.tile
        if over <= 0:
            return 0
        return over if self.tile == 0 else -(-over // self.tile) * self.tile

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self.keys.narrow(2, first, last - first), self.values.narrow(2, first, last - first)

    def write(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values in one launch. The op sees one page, whose heads are those of the whole batch."""
        slots = self.slots[first : first + keys.shape[2]]
        tokens = (x.flatten(0, 1).transpose(0, 1) for x in (keys, values))  # [T, B * HK, D]
        pages = (x.view(1, -1, *x.shape[2:]).transpose(1, 2) for x in (self.keys, self.values))
        torch.ops.gdn.reshape_and_cache_(*tokens, *pages, slots)

    def drop_oldest(self, count: int, length: int) -> None:
        """Drops the `count` oldest of `length` rows that are no sinks, and moves the others up."""
        keys, values = self.rows(self.sinks + count, length)
        self.write(self.sinks, keys.clone(), values.clone())  # the source and the target may overlap

    def around(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns the decoded keys and values with the sinks before them and the newest rows after them."""
        sinks = min(self.sinks, length)
        parts = zip(self.rows(0, sinks), (keys, values), self.rows(sinks, length), strict=True)
        before_and_behind = [torch.cat([part.to(keys.dtype) for part in each], 2) for each in parts]
        return before_and_behind[0], before_and_behind[1]

    def resize(self, capacity: int, start: int, end: int) -> None:
        """Takes memory for a cache of `capacity` tokens and keeps the rows from start to end."""
        rows = max(self.most(capacity), end - start)
        self.keys, self.values = (resized(x, rows, start, end) for x in (self.keys, self.values))
        self.slots = torch.arange(rows, dtype=torch.int32, device=self.keys.device)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
