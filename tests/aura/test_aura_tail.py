"""Tests that a cache keeps its first and newest tokens exact: attention after any history equals a float64 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.devices import kernels_run, on_a_mac
from tests.helpers.errors import assert_close
from tests.helpers.prefill import on_mps
from torch_gdn import reference
from torch_gdn.aura import KVCache, Scheme

D, SEED, SCHEME = 64, 3, Scheme("4v3t")


class History:
    """Holds the appended keys and values, and knows which of them are codes now."""

    def __init__(self, tail: int, sinks: int) -> None:
        self.tail, self.sinks, self.tile = tail, sinks, min(tail, 128)
        self.k, self.v = torch.zeros(2, 2, 0, D), torch.zeros(2, 2, 0, D)
        self.coded: list[bool] = []

    def append(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.coded += [False] * k.shape[2]
        while len(rows := self.exact_rows()) > self.tail + self.tile:
            for row in rows[: self.tile or len(rows)]:
                self.coded[row] = True

    def exact_rows(self) -> list[int]:
        return [i for i, coded in enumerate(self.coded) if i >= self.sinks and not coded]

    def keep(self, first: int, last: int) -> None:
        self.k, self.v, self.coded = self.k[:, :, first:last], self.v[:, :, first:last], self.coded[first:last]

    def select(self, rows: list[int]) -> None:
        self.k, self.v = self.k[rows], self.v[rows]

    def vectors(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Returns keys and values. Coded tokens have the cache's decoded codes, which must be close to them."""
        coded, result = torch.tensor(self.coded), []
        for x, of in ((self.k.double(), cache.keys), (self.v.double(), cache.values)):
            parts = (part.cpu() for part in (*of.filled(cache.coded), *of.tables))
            means = None if of.tile_means is None else of.tile_means.cpu()
            decoded = reference.aura_decode(*parts, dtype=torch.float64, tile_means=means)
            assert ((decoded - x[:, :, coded]).norm(dim=-1) < 0.3 * x[:, :, coded].norm(dim=-1)).all()
            result.append(x.masked_scatter(coded[:, None], decoded))
        return result[0], result[1]


class Both:
    """A cache and its history."""

    def __init__(self, device: torch.device, tail: int, sinks: int, capacity: int) -> None:
        self.device, self.history = device, History(tail, sinks)
        self.cache = KVCache(SCHEME, 2, 2, D, capacity, device, torch.float32, seed=SEED, tail=tail, sinks=sinks)

    def append(self, tokens: int) -> None:
        """Appends keys whose channels have means that change with the position and the row of the batch."""
        place, before = torch.arange(len(self.cache), len(self.cache) + tokens), self.cache.coded
        means = (place[:, None] / 100 + torch.arange(D)).cos() * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
        k, v = torch.randn(2, 2, tokens, D) + means, torch.randn(2, 2, tokens, D)
        self.history.append(k, v)
        self.cache.append(k.to(self.device), v.to(self.device))
        if self.cache.keys.tile_means is not None:
            self.check_means(self.cache.keys.tile_means.cpu(), before)

    def check_means(self, tile_means: Tensor, before: int) -> None:
        """A tile's means cover its tokens that became codes together with its first token."""
        rows = [i for i, coded in enumerate(self.history.coded) if coded]
        for slot in range(-(-before // 128) * 128, len(rows), 128):
            means = self.history.k[:, :, rows[slot : slot + 128]].double().mean(2)
            assert_close("means", tile_means[:, :, slot // 128], means, 1e-3, head_dim=1)

    def crop(self, length: int) -> None:
        self.cache.crop(length)
        self.history.keep(0, length)

    def check(self, L: int = 1, window: int = 0) -> None:
        """Compares attention with float64. Row 1 has one token of left padding."""
        T = len(self.history.coded)
        assert len(self.cache) == T and self.cache.coded == sum(self.history.coded)
        k, v = self.history.vectors(self.cache)
        q, starts = 2 * torch.randn(2, 4, L, D), torch.tensor([0, 1])
        keys, queries = torch.arange(T), torch.arange(T - L, T)[:, None]
        mask = (keys <= queries) & (keys > queries - (window or T)) & (keys >= starts[:, None, None, None])
        expected = scaled_dot_product_attention(q.double(), k, v, attn_mask=mask, enable_gqa=True)
        o = self.cache.attend(q.to(self.device), window=window, starts=starts.to(self.device))
        assert_close("o", o.cpu(), expected, 1e-5, head_dim=1)
        for name, ours, exact in zip(("keys", "values"), self.cache.decoded(), (k, v), strict=True):
            assert_close(name, ours.cpu(), exact, 1e-5, head_dim=1)


def test_lengths_around_the_sinks_the_tail_and_a_tile(device: torch.device) -> None:
    both = Both(device, tail=128, sinks=4, capacity=400)
    for length in (3, 4, 5, 127, 128, 129, 131, 132, 133, 255, 256, 259, 260, 261, 389):
        both.append(length - len(both.cache))
        both.check(L=3 if length % 2 else 1)
    assert both.cache.coded == 256


@pytest.mark.parametrize("tokens", [2, 3, 17, 140, 300])
def test_a_prompt_at_once(device: torch.device, tokens: int) -> None:
    """New tokens that leave the tail immediately are encoded directly. 17 queries use the matrix kernel."""
    both = Both(device, tail=32, sinks=3, capacity=400)
    both.append(tokens)
    both.check(L=min(tokens, 17), window=50)
    both.append(65)
    both.check()
    assert both.cache.coded % 32 == 0 and both.cache.coded >= tokens + 65 - 3 - 64


@pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")
@on_mps()
def test_a_step_of_decoding_encodes_once_per_tile(device: torch.device) -> None:
    import mps_simulator

    both, result = Both(device, tail=4, sinks=2, capacity=64), []
    both.append(10)
    for _ in range(8):
        with mps_simulator.profile() as profile:
            both.append(1)
            both.cache.attend(torch.randn(2, 4, 1, D).to(device))
        result.append(sum(figures.dispatches for figures in profile.kernels.values()))
    step = 1 + 4  # one for the token's key and value; then rotation, both passes, exact rows
    tile = step + 2 + 1  # codes of keys and of values; then the tail moves
    assert result == [tile, step, step, step, tile, step, step, step]


@pytest.mark.parametrize("length", [26, 20, 12, 3, 1, 0])
def test_going_on_after_a_crop(device: torch.device, length: int) -> None:
    """Crops within the tail, the codes and the sinks. Codes stay codes, and the tail fills up again."""
    both = Both(device, tail=3, sinks=2, capacity=40)
    for tokens in (5, 1, 1, 1, 20):
        both.append(tokens)
    both.crop(length)
    if length > 0:
        both.check(window=5)
    for tokens in (2, 1, 1, 9):
        both.append(tokens)
        both.check(L=2)


@pytest.mark.parametrize("length", [3, 9, 20])  # without codes, with a full tail, and with a crop within the codes
def test_going_on_after_other_rows_more_memory_and_a_file(device: torch.device, tmp_path: Path, length: int) -> None:
    both = Both(device, tail=3, sinks=2, capacity=length if length < 20 else 30)
    both.append(length if length < 20 else 30)
    both.crop(length)
    both.cache.reorder(torch.tensor([1, 0]).to(device))
    both.history.select([1, 0])
    both.check()
    both.cache.save(tmp_path / "cache")
    both.cache = KVCache.load(tmp_path / "cache", device)
    assert both.cache.capacity == length and (both.cache.tail, both.cache.sinks) == (3, 2)
    both.check()
    both.cache.reserve(40)
    for tokens in (1, 1, 12, 1):
        both.append(tokens)
        both.check(L=1)


@pytest.mark.parametrize(
    ("tail", "tokens", "cuts"),
    [
        (2, 30, {25: 25, 9: 9, 3: 3, 0: 0}),
        (20, 30, {25: 25, 9: 9, 3: 3, 0: 0}),
        (128, 400, {300: 400, 200: 276, 149: 149, 9: 9}),  # codes leave in whole tiles
    ],
)
def test_a_window_forgets_codes_first(device: torch.device, tail: int, tokens: int, cuts: dict[int, int]) -> None:
    """Appends 4 tokens after each cut."""
    both = Both(device, tail=tail, sinks=0, capacity=tokens)
    both.append(tokens)
    for wanted, kept in cuts.items():
        both.cache.keep_last(wanted, kept + 4 if kept < 12 else tokens + 10)
        assert len(both.cache) == kept
        both.history.keep(len(both.history.coded) - kept, None)
        if kept > 0:
            both.check(window=6)
            both.check(window=wanted)
        both.append(4)
        both.check(L=2, window=6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("length", [204, 260, 300])  # within a tile of codes, at its end, after the codes
def test_a_tile_of_codes_keeps_its_means(device: torch.device, tmp_path: Path, length: int) -> None:
    both = Both(device, tail=128, sinks=4, capacity=900)
    both.append(500)
    both.crop(length)
    both.append(400)
    both.check(L=2)
    both.cache.save(tmp_path / "cache")
    both.cache = KVCache.load(tmp_path / "cache", device, 900)
    both.cache.reorder(torch.tensor([1, 0]).to(device))
    both.history.select([1, 0])
    both.check(L=17)
    both.append(150)
    both.check(L=4)


def test_a_key_that_is_not_finite_spoils_no_other_one_of_its_tile(device: torch.device) -> None:
    cache = KVCache("4v4", 1, 1, D, 300, device, torch.float32, sinks=0)
    k = torch.randn(1, 1, 300, D)
    k[0, 0, 3, 5], k[0, 0, 4, 6] = torch.nan, torch.inf
    cache.append(k.to(device), torch.randn(1, 1, 300, D).to(device))
    decoded = cache.decoded()[0].cpu()[0, 0]
    assert decoded.isfinite().all(-1).nonzero().flatten().tolist() == [i for i in range(300) if i not in (3, 4)]
    assert ((decoded[5:] - k[0, 0, 5:]).norm() < 0.1 * k[0, 0, 5:].norm()).item()


def test_nothing_is_exact_without_a_tail_and_sinks(device: torch.device) -> None:
    both = Both(device, tail=0, sinks=0, capacity=20)
    both.append(19)
    with kernels_run(device, "aura_encode"):
        both.append(1)
    both.check()
    assert both.cache.coded == 20 and both.cache.bytes_used == 2 * 2 * 20 * (4 * (8 + 6) + 4)


@pytest.mark.parametrize("tail", [32, 96])
def test_keys_of_a_short_tail_have_means(device: torch.device, tail: int) -> None:
    """Fewer tokens than a tile become codes together. A tile keeps the means of its first ones."""
    both = Both(device, tail=tail, sinks=3, capacity=600)
    both.append(tail + 50)
    for _ in range(8):
        both.append(45)
        both.check()
    assert both.cache.keys.tile_means is not None and both.cache.coded > 256


@pytest.mark.parametrize(
    ("tail", "capacity", "tokens", "coded", "tiles"),
    [(4, 100, 50, 40, 0), (32, 300, 250, 192, 2), (33, 300, 250, 198, 0), (128, 500, 400, 256, 2)],
)
def test_bytes(tail: int, capacity: int, tokens: int, coded: int, tiles: int) -> None:
    both = Both(torch.device("cpu"), tail=tail, sinks=2, capacity=capacity)
    both.append(tokens)
    exact, means = tokens - coded, D * 2
    assert both.cache.bytes_used == 2 * 2 * (coded * (4 * (8 + 6) + 4) + exact * 2 * D * 4 + tiles * means)
    codes = capacity - 2 - tail
    tile_values = -(-codes // 128) * means if tiles else 0
    assert both.cache.bytes_reserved == 2 * 2 * (codes * (4 * (8 + 6) + 4) + (2 + 2 * tail) * 2 * D * 4 + tile_values)
