"""Tests torch_gdn.aura.trellis: streams by their definition, encoding against all streams, tables against bounds."""

from __future__ import annotations

import doctest
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evidence.lab.studies import trellis_training
from torch_gdn.aura import tables, trellis
from torch_gdn.reference.trellis import windows

EVERY = [(window, bits) for window, rates in trellis.RATES.items() for bits in rates]
SQUARED_ERRORS = {  # bounds for (window, bits) of a table; Lloyd-Max has 0.1175, 0.03455, 0.0095 and 0.0025
    (6, 2): 0.0825,
    (6, 3): 0.0238,
    (6, 4): 0.0069,
    (8, 2): 0.0780,
    (8, 3): 0.0210,
    (8, 4): 0.0058,
    (10, 5): 0.00147,
}


def by_definition(stream: list[int], table: Tensor, bits: int) -> list[float]:
    """Decodes value by value from the stream's bits, in float64."""
    ring = [byte >> i & 1 for byte in stream for i in range(8)]
    L, values = len(table).bit_length() - 1, []
    for i in range(len(ring) // bits):
        window = sum(ring[(i * bits + j) % len(ring)] << j for j in range(L))
        values.append(table.double()[window].item())
    return values


@pytest.mark.parametrize(("window", "bits"), EVERY)
def test_a_stream_decodes_to_what_the_definition_says(window: int, bits: int) -> None:
    table = trellis.table(window, bits)
    streams = torch.randint(256, (2, 3, 10 * bits), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    result = trellis.decode(streams, table.double(), bits)
    expected = [[by_definition(stream.tolist(), table, bits) for stream in row] for row in streams]
    assert torch.equal(result, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("window", "bits", "at_most"), [(6, 2, 2.0), (4, 1, 1.03)])
def test_no_stream_that_closes_in_the_same_state_is_nearer(window: int, bits: int, at_most: float) -> None:
    """The test tries all 65,536 streams of 16 bits. The second pass is exact. With 8 values on each side of the joint,
    the first pass finds a state that costs little (4 values are too few)."""
    table = trellis.odd(torch.randn(1 << (window - 1), generator=torch.Generator().manual_seed(0)))
    every = torch.tensor(list(itertools.product(range(256), repeat=2)), dtype=torch.uint8)
    x = torch.randn(32, 16 // bits, generator=torch.Generator().manual_seed(0)).double()
    errors = (x[:, None] - trellis.decode(every, table.double(), bits)).square().sum(-1)
    joints = windows(every, table, bits)[:, -1] >> bits
    result = trellis.encode(x, table, bits).long()
    chosen = result[:, 0] * 256 + result[:, 1]
    mine = errors.gather(1, chosen[:, None])[:, 0]
    closing_alike = joints[chosen][:, None] == joints
    assert (mine <= errors.where(closing_alike, torch.inf).amin(1) * (1 + 1e-6)).all()
    assert mine.sum() <= at_most * errors.amin(1).sum()


@pytest.mark.parametrize(("window", "bits"), EVERY)
@pytest.mark.parametrize("length", [80, 256])
def test_normal_values_lose_as_little_as_was_measured(window: int, bits: int, length: int) -> None:
    table = trellis.table(window, bits)
    x = torch.randn(20_480 // length, length, generator=torch.Generator().manual_seed(1))
    error = trellis_training.squared_error(table, bits, x)
    assert 2.0 ** (-2 * bits) < error < 1.03 * SQUARED_ERRORS[window, bits]


@pytest.mark.parametrize(("window", "bits"), EVERY)
def test_a_table_is_odd_whole_numbers_and_where_training_leaves_it(window: int, bits: int) -> None:
    table = trellis.table(window, bits)
    whole = table / tables.read(trellis.FILE)[str(window)][str(bits)]["step"]
    assert torch.equal(table, -table.flip(0)) and whole.abs().max().round() == 127
    assert (whole - whole.round()).abs().max() < 1e-4
    half = table[: len(table) // 2]
    trained = trellis_training.improved(half, bits, trellis_training.normal(200, torch.Generator().manual_seed(2)))
    assert (trained - half).square().mean().sqrt() < 0.1


def test_training_makes_the_same_table_again() -> None:
    effort = trellis_training.Effort(starts=2, rounds=3, vectors=32, last_rounds=1, last_vectors=32)
    first, second = (trellis_training.as_bytes(trellis_training.train(6, 2, effort)) for _ in range(2))
    assert first == second and len(first["labels"]) == 32


def test_the_program_writes_a_table_for_each_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes hours. Here it only notes what it is asked for."""
    asked: list[tuple[int, int]] = []

    def train(window: int, bits: int, effort: trellis_training.Effort) -> Tensor:
        assert effort is trellis_training.EFFORTS[window] and min(effort) > 0
        asked.append((window, bits))
        return torch.linspace(-1, 0, 1 << (window - 1))

    monkeypatch.setattr(trellis_training, "FILE", tmp_path / trellis.FILE)
    monkeypatch.setattr(trellis_training, "train", train)
    monkeypatch.setattr(trellis_training, "squared_error", lambda table, bits, x: 0.0)
    trellis_training.main()
    written = json.loads((tmp_path / trellis.FILE).read_text())
    assert asked == [(int(window), int(bits)) for window, rates in written.items() for bits in rates] == EVERY
    for window, bits in EVERY:
        assert len(written[str(window)][str(bits)]["labels"]) == 1 << (window - 1)


@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 3, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    table, x = trellis.table(6, 3), torch.zeros(shape)
    stream = trellis.encode(x, table, 3)
    assert stream.shape == (*shape[:-1], 24) and trellis.decode(stream, table, 3).shape == shape


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"window: expected one of 6, 8, 10, got 7"):
        trellis.table(7, 2)
    with pytest.raises(ValueError, match=r"bits: expected one of 2, 3, 4, got 5"):
        trellis.table(8, 5)
    for sizes, bits in (([63], 2), ([4], 2), ([8, 8], 2), ([64], 0), ([64], 6)):
        with pytest.raises(ValueError, match="table: expected"):
            trellis.encode(torch.zeros(1, 64), torch.zeros(sizes), bits)
    for length in (3, 2):
        with pytest.raises(ValueError, match="expected a stream of whole bytes"):
            trellis.encode(torch.zeros(1, length), trellis.table(6, 2), 2)


def test_the_examples_run() -> None:
    failed, attempted = doctest.testmod(sys.modules[trellis.__name__])
    assert failed == 0 and attempted >= 6
