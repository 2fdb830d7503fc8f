from __future__ import annotations

import torch
from torch import Tensor

MOST_OF_TILE = 128  # tokens that become codes together


class ExactRows:
    """The first `sinks` tokens of a cache and its newest ones, in the dtype in which they came.

    Of the newest at least `tail` stay once there are as many; what is older becomes codes a tile at a time, so that up
    to `tail` and a tile of them are held. A tile has `tail` tokens, at most 128.
    """

    def __init__(self, like: Tensor, sinks: int, tail: int, capacity: int) -> None:
        """`like`: an empty tensor [B, HK, 0, D] of the cache's dtype and device."""
        self.sinks, self.tail, self.tile = sinks, tail, min(tail, MOST_OF_TILE)
        self.keys = self.values = like
        self.resize(capacity, 0, 0)

    def most(self, capacity: int) -> int:
        """How many rows a cache of so many tokens needs."""
        return min(capacity, self.sinks + self.tail + self.tile)

    def surplus(self, rows: int) -> int:
        """How many of so many rows are to become codes."""
        over = rows - self.sinks - self.tail - self.tile
        if over <= 0:
            return 0
        return over if self.tile == 0 else -(-over // self.tile) * self.tile

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self.keys.narrow(2, first, last - first), self.values.narrow(2, first, last - first)

    def write(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values in one launch, as a page whose heads are those of all rows of the batch."""
        slots = self.slots[first : first + keys.shape[2]]
        tokens = (x.flatten(0, 1).transpose(0, 1) for x in (keys, values))  # [T, B * HK, D]
        pages = (x.view(1, -1, *x.shape[2:]).transpose(1, 2) for x in (self.keys, self.values))
        torch.ops.gdn.reshape_and_cache_(*tokens, *pages, slots)

    def drop_oldest(self, count: int, length: int) -> None:
        """Of the rows behind the sinks; `length` is that of all before."""
        keys, values = self.rows(self.sinks + count, length)
        self.write(self.sinks, keys.clone(), values.clone())  # the source and the target may overlap

    def around(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """These, which are what the codes stand for, between the sinks and the newest rows."""
        sinks = min(self.sinks, length)
        parts = zip(self.rows(0, sinks), (keys, values), self.rows(sinks, length), strict=True)
        before_and_behind = [torch.cat([part.to(keys.dtype) for part in each], 2) for each in parts]
        return before_and_behind[0], before_and_behind[1]

    def resize(self, capacity: int, start: int, end: int) -> None:
        """Memory for a cache of `capacity` tokens, the first rows of which are those from start to end."""
        rows = max(self.most(capacity), end - start)
        for name in ("keys", "values"):
            x = getattr(self, name)
            other = x.new_zeros(*x.shape[:2], rows, x.shape[3])
            other[:, :, : end - start] = x[:, :, start:end]
            setattr(self, name, other)
        self.slots = torch.arange(rows, dtype=torch.int32, device=self.keys.device)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
