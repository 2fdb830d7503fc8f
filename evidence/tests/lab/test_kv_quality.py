"""Tests evidence.lab.studies.kv_formats, kv_models and kv_quality: it compares bits with bytes, codes with definitions,
and attention with a cache that grows token by token. docs/lab/cache-formats.md has the figures.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_gdn
from evidence.lab.studies import kv_formats, kv_models, kv_quality
from evidence.lab.studies.cache_formats import Stored
from evidence.lab.studies.kv_formats import Format, Part, all_formats
from torch_gdn.aura import codebooks

FORMATS = all_formats()


def with_exact(bits: float, exact: float) -> float:
    """Returns bits per value if `exact` of 8,192 tokens are in float16."""
    return bits + exact / 8192 * (16 - bits)


TAIL = 64 + 4 + 63.5  # the tokens in float16: the tail, the sinks, and on average half a tile
EXPECTED = {  # bits per value at 8,192 tokens and D = 64, and the relative errors of `sample`'s keys and values
    "AURA 4v4": (4 + 32 / 64, 0.0925, 0.0944),
    "AURA 8v4": (6 + 32 / 64, 0.0060, 0.0944),
    "AURA 4v4, tail 64": (with_exact(4 + 16 / 64, TAIL), 0.0925, 0.0944),
    "AURA 4v4, tail 64, means": (with_exact(4 + 16 / 64 + 16 / 128 / 2, TAIL), 0.0683, 0.0944),
    "AURA 4v4, tail 128, means, trellis 8": (with_exact(4 + 16 / 64 + 16 / 128 / 2, TAIL + 64), 0.0546, 0.0741),
    "AURA 4v4t, tail 128": (with_exact(4 + 16 / 64 + 16 / 128 / 2, TAIL + 64), 0.0585, 0.0810),
    "AURA 4v4t, tail 128, earlier means": (with_exact(4 + 16 / 64 + 16 / 128 / 2, TAIL + 64), 0.0585, 0.0810),
    "AURA 4v4t, tail 128, no means": (with_exact(4 + 16 / 64, TAIL + 64), 0.0810, 0.0810),
    "AURA 4v4, tail 128, earlier means": (with_exact(4 + 16 / 64 + 16 / 128 / 2, TAIL + 64), 0.0683, 0.0944),
    "AURA 2v2, tail 64, means, trellis 6": (with_exact(2 + 16 / 64 + 16 / 128 / 2, TAIL), 0.2087, 0.2858),
    "AURA 5v5, tail 64, means, trellis 10": (with_exact(5 + 16 / 64 + 16 / 128 / 2, TAIL), 0.0272, 0.0371),
    "q4_0, rotated": (4 + 16 / 32, 0.0844, 0.0854),
    "quanto 4 bits": (with_exact(4 + 32 / 64, 63.5), 0.0882, 0.0897),
    "turboquant_4bit_nc": (4 + (16 / 64 + 32 / 64) / 2, 0.0925, 0.0897),
    "turboquant_k8v4": ((8 + 4 + 32 / 64) / 2, 0.0267, 0.0897),
    "KIVI-2": ((with_exact(2 + 32 / 32, 63.5) + with_exact(2 + 32 / 32, 128)) / 2, 0.2904, 0.3924),
    "KVarN k4v2": (
        (with_exact(4 + 16 / 64 + 32 / 128, 128 + 63.5) + with_exact(2 + 32 / 64 + 16 / 128, 128 + 63.5)) / 2,
        0.0724,
        0.4459,
    ),
}


@pytest.fixture(scope="module")
def sample() -> tuple[Tensor, Tensor]:
    """Returns values, and keys whose channels have means as large as their deviations, as in models."""
    generator = torch.Generator().manual_seed(0)
    k, v, mean = (torch.randn(2, count, 64, generator=generator) for count in (256, 256, 1))
    return k + mean, v


def relative_error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("name", EXPECTED)
def test_bits_are_what_the_bytes_say_and_errors_what_was_measured(name: str, sample: tuple[Tensor, Tensor]) -> None:
    bits, *errors = EXPECTED[name]
    assert FORMATS[name].bits(8192, 64) == pytest.approx(bits, rel=1e-9)
    for part, x, error in zip(FORMATS[name][2:], sample, errors, strict=True):
        assert relative_error(part.code(x).decoded, x) == pytest.approx(error, rel=0.02)


def test_aura_without_a_trellis_is_what_the_ops_code(sample: tuple[Tensor, Tensor]) -> None:
    k, signs, codebook = sample[0], codebooks.aura_signs(64, 0), codebooks.codebook(4, 64)
    tables = signs, codebooks.boundaries(codebook), codebook
    codes, norms = torch_gdn.aura_encode(k, *tables)
    expected = torch_gdn.aura_decode(codes, norms, codebook, signs, dtype=torch.float32)
    assert relative_error(kv_formats.aura(k, bits=4, seed=0).decoded, expected) < 1e-5


def test_earlier_means_are_those_of_vllms_pages_in_decoding(sample: tuple[Tensor, Tensor]) -> None:
    """A prompt of 128 tokens, and then one token more."""
    k = sample[0].transpose(0, 1)[:129]
    means, ring = torch.zeros(2, 1, 2, 64).half(), k[None, :128].clone()
    table, zero = torch.tensor([[0, 1]]), torch.tensor([0])
    for new, length in ((k[:128], 128), (k[128:], 129)):
        sequence = table, torch.tensor([0, len(new)]), torch.tensor([length])
        torch_gdn.aura_paged_tile_means(new, means, *sequence, ring, zero, zero, tail=128)
    result = kv_formats.means_of_tiles(sample[0], earlier=True)
    assert (result[:, :, 0] - means[:, 0].transpose(0, 1)).abs().max() < 1e-3
    assert (result[:, 1] - kv_formats.means_of_tiles(sample[0])[:, 1]).abs().max() > 0.1


def test_kvarn_is_a_step_a_minimum_and_two_scales(sample: tuple[Tensor, Tensor]) -> None:
    """Every value, token by token, is within half a step of its decoded value, and deviations are even."""
    tile = sample[1][:1, :128]
    by_token, by_channel = kv_formats.even_scales(tile)
    balanced = tile / by_token / by_channel
    for dim in (-1, -2):
        std = balanced.std(dim)
        assert std.max() / std.min() < 1.05
    stored = kv_formats.kvarn(tile, 4, -1)
    step, _, scale = stored.tensors[1:]
    within = (stored.decoded - tile).abs() / (step.float() * scale.float())[0]
    assert 0.45 < within.max() < 0.55


def test_kivis_groups_are_channels_of_tokens_and_tokens_of_channels() -> None:
    """Two values of each group decode exactly. In groups across the other dimension they would not."""
    x = (
        torch.arange(4.0).repeat_interleave(32)[:, None]
        + torch.arange(64.0) ** 2 / 100
        + torch.arange(128)[:, None] % 2
    )
    assert relative_error(FORMATS["KIVI-2"].keys.code(x).decoded, x) < 1e-3
    assert relative_error(FORMATS["KIVI-2"].values.code(x.mT.contiguous()).decoded, x.mT) < 1e-3


@pytest.mark.parametrize(
    "part", [Part("", Part.code, *sizes) for sizes in ((1, 0, 0), (8, 5, 3), (4, 0, 4), (1, 6, 0))]
)
def test_codes_end_where_a_cache_that_grows_ends_them(part: Part) -> None:
    coded = 0
    for tokens in range(1, 60):
        if tokens - part.sinks - coded >= part.tail + part.tile:
            coded += part.tile
        assert int(part.first_exact(torch.tensor(tokens))) == part.sinks + coded


def coarse(x: Tensor) -> Stored:
    return Stored((x.half(),), x.round())


@pytest.mark.parametrize("first", [0, 100])
def test_each_position_reads_the_codes_that_its_cache_has(first: int) -> None:
    """Keys and values have different tails, and an earlier call coded the prefix. The reference is float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 300, 16, generator=generator) for heads in (4, 2, 2))
    form = Format("", "", Part("", coarse, tile=16, tail=20, sinks=3), Part("", coarse, tail=40, sinks=1))
    layer = kv_models.Layer(q[:, first:], k, v)
    mixed = []
    for part, x in zip(form[2:], (k, v), strict=True):
        known = None if first == 0 else x[:, part.sinks : part.sinks + 64].round()
        mixed.append(kv_models.kept(part, x, known))
    result = kv_models.attend(layer, *mixed, form, 0.25)
    for at in range(first, 300, 7):
        keys, values = (x[:, : at + 1].double() for x in (k, v))
        for part, x in ((form.keys, keys), (form.values, values)):
            end = int(part.first_exact(torch.tensor(at + 1)))
            x[:, part.sinks : end] = x[:, part.sinks : end].round()
        scores = keys.repeat_interleave(2, 0) @ q[:, at, :, None].double() * 0.25
        expected = (scores.softmax(1).mT @ values.repeat_interleave(2, 0))[:, 0]
        assert relative_error(result[:, at - first], expected) < 1e-5


def test_a_model_that_reads_exact_values_loses_nothing_and_one_that_reads_coarse_ones_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_models, "JUDGED", 64)
    model = kv_models.Pycode(300, count=1)
    losses = []
    for code in (lambda x: Stored((x,), x), coarse):
        part = Part("", code, tile=16, tail=20, sinks=3)
        losses.append(model.judge(Format("", "", part, part)))
    exact, rounded = losses
    assert exact.error < 1e-5 < 0.05 < rounded.error < 0.5
    assert 0.3 < exact.bits_per_byte < 3 and abs(rounded.bits_per_byte - exact.bits_per_byte) > 1e-4


def test_where_smollm2_is_not_installed_you_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_models, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        kv_models.SmolLM2(2048, "")


def test_table_verdicts_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kv_quality, "RESULTS", tmp_path / "results.json")
    ours, theirs = "AURA 4v4, tail 64, means, trellis 8", "q4_0, rotated"
    for name, kl, error in ((ours, 0.001, 0.04), (theirs, 0.05, 0.06)):
        kv_quality.write("SmolLM2, 8k", name, {"bits": 4.5, "kl": kl, "deviation": 0.0, "same": 0.9})
        kv_quality.write("pycode, 8k", name, {"bits": 4.38, "error": error, "bits_per_byte": 1.0})
    results = kv_quality.read()
    rows = kv_quality.table(results, FORMATS).split("\n")
    assert len(rows) == 4 and {row.count("|") for row in rows} == {12} and "| 90.0 % |" in rows[2]
    verdicts = "\n".join(kv_quality.judge(results))
    assert "SmolLM2, 8k: kl at most 0.0015 at 4.5 bits: met, 0.001" in verdicts
    assert "SmolLM2, 8k: kl at most 0.005 at 3.5 bits: not met, inf" in verdicts
    assert "pycode, 8k: error at most 0.033 at 4.4 bits: not met, 0.04" in verdicts
    assert f"{theirs}, 4.50 bits, 0.05: met, 0.001 with {ours}" in verdicts
    kv_quality.plot(results, FORMATS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_table_of_the_results() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/lab/cache-formats.md").read_text()
    assert kv_quality.table(kv_quality.read(), FORMATS) in page
    assert math.isfinite(sum(result["kl"] for result in kv_quality.read()["SmolLM2, 8k"].values()))
