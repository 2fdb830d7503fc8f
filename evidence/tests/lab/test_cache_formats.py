"""Compares each cache format of evidence.lab.studies with its definition in float64, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evidence.lab.studies import cache_formats, format_quality
from evidence.lab.studies.cache_formats import FORMATS, Stored
from evidence.lab.studies.format_quality import FAMILIES, Source

ROOT = Path(__file__).resolve().parents[3]
Definition = Callable[[list[float]], list[float]]


def half(x: float) -> float:
    return float(np.float16(x))


def q8_0(block: list[float]) -> list[float]:
    d = max(map(abs, block)) / 127
    return [round(x / d) * half(d) for x in block]


def lowest_code_of_the_largest(bits: int) -> Definition:
    def define(block: list[float]) -> list[float]:
        d = max(block, key=abs) / -(2 ** (bits - 1))
        codes = [min(2**bits - 1, math.floor(x / d + 2 ** (bits - 1) + 0.5)) for x in block]
        return [(code - 2 ** (bits - 1)) * half(d) for code in codes]

    return define


def from_smallest_to_largest(bits: int) -> Definition:
    def define(block: list[float]) -> list[float]:
        d = (max(block) - min(block)) / (2**bits - 1)
        return [math.floor((x - min(block)) / d + 0.5) * half(d) + half(min(block)) for x in block]

    return define


def nearest_e4m3(tensor: list[float]) -> list[float]:
    """Rounds to e4m3: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa. All ones is not a number."""
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    large = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    magnitudes, scale = small + large, max(map(abs, tensor)) / 448
    return [math.copysign(min(magnitudes, key=lambda y: abs(abs(x) / scale - y)) * scale, x) for x in tensor]


DEFINITIONS: dict[str, tuple[Definition, int, float]] = {  # definition, values of a block, bits per value
    "fp8 e4m3": (nearest_e4m3, 512, 8 + 32 / 512),
    "q8_0": (q8_0, 32, 8.5),
    "q5_0": (lowest_code_of_the_largest(5), 32, 5.5),
    "q4_1": (from_smallest_to_largest(4), 32, 5.0),
    "q4_0": (lowest_code_of_the_largest(4), 32, 4.5),
    "4 bits by 64": (from_smallest_to_largest(4), 64, 4.5),
    "2 bits by 64": (from_smallest_to_largest(2), 64, 2.5),
}


def test_every_format_has_a_definition() -> None:
    assert DEFINITIONS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_round_trip_is_the_definitions(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 128) * torch.logspace(-2, 1, 4)[:, None]
    define, size, bits = DEFINITIONS[name]
    expected = torch.tensor([define(block.tolist()) for block in x.double().view(-1, size)], dtype=torch.float64)
    stored = FORMATS[name](x)
    assert (stored.decoded.double() - expected.view_as(x)).abs().max() <= 1e-6 * x.abs().max()
    assert stored.bits == bits


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8 e4m3"])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_block_of_one_value_comes_back(name: str, value: float) -> None:
    x = torch.full((1, 64), value)
    assert (FORMATS[name](x).decoded - x).abs().max() <= 1e-3 * value


@pytest.mark.parametrize(("name", "code"), [("q5_0", 16), ("q4_0", 8), ("q4_1", 0), ("4 bits by 64", 0)])
def test_a_block_of_zeros_has_the_code_of_zero(name: str, code: int) -> None:
    planes = FORMATS[name](torch.zeros(1, 64)).tensors[0]
    assert (cache_formats.unpack(planes) == code).all()


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_planes_of_bits_unpack(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(0))
    planes = cache_formats.pack(codes, bits)
    assert planes.nbytes == 3 * 64 * bits // 8
    assert torch.equal(cache_formats.unpack(planes), codes)


def test_rotated_before_and_back_after() -> None:
    """The format gets a vector with energy in every channel. The decoded vector has it in the original places."""
    x, seen = torch.eye(128)[:3], list[Tensor]()

    def keep(rotated: Tensor) -> Stored:
        seen.append(rotated)
        return Stored((rotated,), rotated)

    back = format_quality.store_rotated(keep, x, seed=0).decoded
    assert torch.allclose(seen[0].abs(), torch.full_like(x, 128**-0.5), atol=1e-6)
    assert (back - x).abs().max() <= 1e-6


def test_attention_is_causal_and_of_the_last_positions() -> None:
    torch.manual_seed(0)
    source = Source(torch.randn(1, 2, 3, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8))
    result = source.attention(source.k, source.v)
    for head in range(2):
        for i in range(3):
            seen = 5 - 3 + i + 1
            scores = source.k[0, 0, :seen].double() @ source.q[0, head, i].double() / math.sqrt(8)
            right = scores.softmax(0) @ source.v[0, 0, :seen].double()
            assert (result[0, head, i] - right).abs().max() <= 1e-12


@pytest.fixture(scope="module")
def found() -> dict[str, list[format_quality.Result]]:
    sizes = {"tokens": 256, "heads": 2}
    by_name = {str(outliers): format_quality.random_source(outliers, **sizes) for outliers in (False, True)}
    return format_quality.compare_all(by_name)


def one(results: list[format_quality.Result], name: str, family: str) -> format_quality.Result:
    (result,) = (r for r in results if (r.name, r.family) == (name, family))
    return result


def test_a_norm_of_two_bytes_is_an_eighth_of_a_bit(found: dict) -> None:
    for results in found.values():
        for scheme, bits in (("4v4", 4.125), ("8v8", 8.125)):
            assert one(results, f"AURA {scheme}", FAMILIES[0]).bits == bits


def test_outliers_cost_blocks_of_neighbours_twice_as_much_but_not_after_the_rotation(found: dict) -> None:
    plain, rotated = ([one(results, "q4_0", family) for results in found.values()] for family in FAMILIES[1:])
    (usual, with_outliers), (_, turned) = ([r.errors[0] for r in pair] for pair in (plain, rotated))
    assert with_outliers > 1.8 * usual > 1.8 * turned


def test_tables_and_plot(found: dict, tmp_path: Path) -> None:
    rows = format_quality.table(found).split("\n")
    assert len(rows) == 2 + len(format_quality.SCHEMES) + 2 * len(FORMATS)
    assert {row.count("|") for row in rows} == {9}
    format_quality.plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_documentation_has_a_row_of_each(found: dict) -> None:
    page = (ROOT / "docs/lab/cache-formats.md").read_text()
    for row in format_quality.table(found).split("\n")[2:]:
        name, bits = row.split("|")[1:3]
        expected = "8.000" if name.startswith(" fp8") else bits.strip()
        assert f"|{name}| {expected} |" in page
