"""Measures the device's own limits in the same run: matrix products, moving bytes, exponentials."""

from __future__ import annotations

import functools

import torch

from bench.timing import measure

SIDE = 1024  # rows and columns
SECONDS = 0.3
LEAST_BYTES, MOST_BYTES = 2**16, 2**29


class Ceilings:
    """The rates of one device, each measured at first use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @functools.cache  # noqa: B019 - as long-lived as the program
    def products(self, dtype: torch.dtype) -> float:
        """Returns operations per second of a square matrix product by the device's own library."""
        a, b = (torch.randn(SIDE, SIDE, device=self.device).to(dtype) for _ in range(2))
        best = measure({"product": lambda: a @ b}, self.device, SECONDS)["product"].best
        return 2 * SIDE**3 / best

    def bytes_a_second(self, total: int) -> float:
        """Returns bytes per second of a copy of about `total` bytes, half read, half written, in cache if they fit."""
        size = min(max(1 << (total - 1).bit_length(), LEAST_BYTES), MOST_BYTES)
        return self._copies(size)

    @functools.cache  # noqa: B019
    def _copies(self, size: int) -> float:
        source = torch.randn(size // 8, device=self.device)
        target = torch.empty_like(source)
        best = measure({"copy": lambda: target.copy_(source)}, self.device, SECONDS)["copy"].best
        return size / best

    @functools.cache  # noqa: B019
    def moving_in_place(self, size: int) -> float:
        """Returns the seconds to read and write `size` bytes in place."""
        x = torch.ones(size // 4, device=self.device)
        return measure({"scale": lambda: x.mul_(1.0)}, self.device, SECONDS)["scale"].best

    @functools.cache  # noqa: B019
    def exponentials(self, count: int) -> float:
        """Returns the seconds for `count` vectorised float32 exponentials, over an array of at most 256 KB."""
        part = min(count, 2**16)
        x = torch.linspace(-5, 5, part, device=self.device)
        out = torch.empty_like(x)
        best = measure({"exp": lambda: torch.exp(x, out=out)}, self.device, SECONDS)["exp"].best
        return best * count / part
