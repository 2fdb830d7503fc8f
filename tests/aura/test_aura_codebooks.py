"""Tests that the centroids are optimal, by an independent integration and by the errors of encoded vectors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evidence.lab.studies import lloyd_max
from torch_gdn import reference
from torch_gdn.aura import codebooks, tables

EVERY = list(itertools.product(codebooks.DIMENSIONS, codebooks.BITS))


def means_of_cells(centroids: Tensor, D: int) -> Tensor:
    """Returns the mean of each positive centroid's cell, by the trapezoid rule on a grid of a million points."""
    centroids = centroids.double()
    x = torch.linspace(0, 1, 2**20 + 1, dtype=torch.float64)
    density = (1 - x * x) ** ((D - 3) / 2)

    def up_to(values: Tensor, ends: Tensor) -> Tensor:
        total = torch.cat([values.new_zeros(1), torch.cumulative_trapezoid(values, x)])
        below = torch.searchsorted(x, ends).clamp(1) - 1
        step = ends - x[below]
        slope = (values[below + 1] - values[below]) / (x[1] - x[0])
        return total[below] + step * (values[below] + slope * step / 2)

    ends = torch.cat([(centroids[:-1] + centroids[1:]) / 2, torch.ones(1, dtype=torch.float64)])
    mass, moment = (up_to(values, ends).diff(prepend=ends.new_zeros(1)) for values in (density, density * x))
    return moment / mass


@pytest.mark.parametrize(("D", "bits"), EVERY)
def test_centroids_are_the_means_of_their_cells(D: int, bits: int) -> None:
    """Only one set of centroids meets this condition. float32 rounding is 6e-8 of a value."""
    half = codebooks.codebook(bits, D)[2 ** (bits - 1) :]
    largest = ((means_of_cells(half, D) - half) * D**0.5).abs().max().item()
    assert largest < 3e-7


@pytest.mark.parametrize("bits", [4, 8])
def test_the_origin_table_is_not(bits: int) -> None:
    """Another table does not meet the condition, so the test above can fail."""
    half = codebooks.codebook(bits, 128, "origin")[2 ** (bits - 1) :]
    largest = ((means_of_cells(half, 128) - half) * 128**0.5).abs().max().item()
    assert largest > 2e-3


def test_the_file_is_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree to 2e-9. The means may be equal in float32 while the centroids are far from converged."""
    committed = tables.read("codebooks.json")
    assert json.loads(lloyd_max.FILE.read_text()) == committed
    monkeypatch.setattr(lloyd_max, "FILE", tmp_path / "codebooks.json")
    lloyd_max.main()
    computed = json.loads(lloyd_max.FILE.read_text())
    assert committed.keys() == computed.keys()
    for (D, of_D), bits in itertools.product(computed.items(), codebooks.BITS):
        worst = (torch.tensor(of_D[str(bits)]) - torch.tensor(committed[D][str(bits)])).abs().max().item()
        assert worst < 2e-9, (D, bits)


def test_lloyds_own_iteration_comes_to_the_same() -> None:
    """It needs 800 rounds for 16 levels, from the origin table on."""
    half = codebooks.codebook(4, 128, "origin")[8:].double()
    for _ in range(800):
        half = lloyd_max.lloyd_step(half, 128)
    assert (half - codebooks.codebook(4, 128)[8:]).abs().max() < 1e-8


@pytest.mark.parametrize(("D", "bits"), EVERY)
def test_codebooks_ascend_and_are_symmetric(D: int, bits: int) -> None:
    centroids = codebooks.codebook(bits, D)
    assert centroids.dtype == torch.float32 and centroids.shape == (2**bits,)
    assert (centroids.diff() > 0).all() and centroids.abs().max() < 1
    assert torch.equal(centroids, -centroids.flip(0))


@pytest.mark.parametrize(
    ("bits", "raw", "corrected"),
    [(2, 0.1160, 0.1190), (3, 0.0340, 0.0338), (4, 0.00931, 0.00918), (5, 0.00242, 0.00240), (8, 4.02e-5, 3.93e-5)],
)
def test_mean_squared_error_of_unit_vectors(bits: int, raw: float, corrected: float) -> None:
    """There are 20,000 random vectors with D = 128. A wrong table has twice the error at 4 bits, and nearly four times
    at 8."""
    x = torch.nn.functional.normalize(torch.randn(20_000, 128, dtype=torch.float64), dim=-1)
    signs, centroids = reference.aura_signs(128, 0), codebooks.codebook(bits, 128)
    codes, norms = reference.aura_encode(x, signs, codebooks.boundaries(centroids), centroids)

    def error(norms: Tensor) -> float:
        decoded = reference.aura_decode(codes, norms, centroids, signs, dtype=torch.float64)
        return (decoded - x).square().sum(-1).mean().item()

    assert error(torch.ones_like(norms)) == pytest.approx(raw, rel=0.02)
    assert error(norms) == pytest.approx(corrected, rel=0.02)


def test_boundaries_are_midpoints() -> None:
    assert codebooks.boundaries(torch.tensor([-4.0, -1.0, 1.0, 4.0])).tolist() == [-2.5, 0.0, 2.5]


def test_origin_table_is_scaled_to_other_sizes() -> None:
    assert torch.equal(codebooks.codebook(4, 512, "origin"), codebooks.codebook(4, 128, "origin") / 2)
    assert codebooks.codebook(4, 128, "origin")[-1].item() == pytest.approx(0.173926)
    assert [len(codebooks.codebook(bits, 128, "origin")) for bits in (2, 3, 4, 8)] == [4, 8, 16, 256]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 128), "codebook: bits: expected one of 2, 3, 4, 5, 8, got 6"),
        ((4, 100), "codebook: D: expected one of 64, 80, 96, 128, 256, 512, got 100"),
        ((4, 128, "mine"), "codebook: table: expected one of 'lloyd-max', 'origin', 'trellis', got 'mine'"),
        ((5, 128, "origin"), "codebook: bits of the table 'origin': expected one of 2, 3, 4, 8, got 5"),
        ((5, 128, "trellis"), "codebook: bits of a trellis: expected one of 2, 3, 4, got 5"),
    ],
)
def test_what_there_is_no_table_for(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codebooks.codebook(*arguments)
