"""Tests evidence/lab/studies/aura_quality.py: its table with fewer tokens. docs/lab/cache-formats.md has its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.lab.studies import aura_quality

ROOT = Path(__file__).resolve().parents[3]
SIZES = aura_quality.Sizes(heads=2, queries=16, tokens=1024)


@pytest.fixture(scope="module")
def errors() -> dict[tuple[str, str], list[float]]:
    return aura_quality.errors(SIZES)


@pytest.mark.parametrize(("scheme", "at_least"), [("4v4", 1.7), ("8v8", 3.0)])
def test_the_right_table_halves_the_squared_error(errors: dict, scheme: str, at_least: float) -> None:
    """This holds at every spread. Between the two codecs, squared errors differ by factors of 2.0 and 3.8."""
    ours, origin = errors[scheme, "lloyd-max"], errors[scheme, "origin"]
    ratios = [(theirs / mine) ** 2 for mine, theirs in zip(ours, origin, strict=True)]
    assert min(ratios) > at_least, ratios


@pytest.mark.parametrize("scheme", ["3v3", "2v2"])
def test_where_the_origins_table_is_right_there_is_no_difference(errors: dict, scheme: str) -> None:
    for ours, origin in zip(errors[scheme, "lloyd-max"], errors[scheme, "origin"], strict=True):
        assert ours == pytest.approx(origin, rel=0.05)


def test_more_bits_are_better(errors: dict) -> None:
    for at in range(len(aura_quality.SPREADS)):
        row = [errors[scheme, "lloyd-max"][at] for scheme in ("8v8", "8v4", "4v4", "4v2")]
        assert row == sorted(row) and row[0] < 0.03 and row[1] < 0.12, row


def test_tables_and_plot(errors: dict, tmp_path: Path) -> None:
    rows = aura_quality.error_table(errors).split("\n")
    assert len(rows) == 2 + 12 and len({row.count("|") for row in rows}) == 1
    aura_quality.plot(errors, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    memory = aura_quality.memory_table(512).split("\n")
    assert memory[3].startswith("| 8v4 | 100 | 1/2.56 | 196 | 1/2.61 | 0.4 MiB | 1/2.64 |")


def test_a_trained_model_hardly_notices_the_safe_scheme() -> None:
    rows = aura_quality.model_table(aura_quality.held_back_pieces(2, 64), ("8v4", "2v2")).split("\n")
    assert [row.count("|") for row in rows] == [5] * 7
    exact = float(rows[2].split("|")[4])
    error, bits = (float(cell) for cell in rows[3].split("|")[3:5])
    assert 0 < error < 0.02 and bits == pytest.approx(exact, rel=0.02)
    assert float(rows[5].split("|")[3]) > 2 * error  # the row of 2v2


def test_the_documentation_has_these_ratios() -> None:
    page = (ROOT / "docs/lab/cache-formats.md").read_text()
    for scheme in aura_quality.SCHEMES:
        row = next(line for line in page.split("\n") if line.startswith(f"| {scheme} | ") and "MiB" in line)
        for D in (64, 128):
            measured = aura_quality.bytes_per_token(scheme, D)
            assert f"| {measured} | 1/{4 * D / measured:.2f} |" in row
