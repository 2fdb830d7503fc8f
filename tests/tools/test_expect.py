"""Tests that `python -m torch_gdn expect` counts a step's bytes, launches and operations, and divides them right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.integrations.models import random_model
from torch_gdn import _macs
from torch_gdn.tools import expect, fits
from torch_gdn.tools.expect import Work

pytest.importorskip("transformers")
COUNTED = json.loads((Path(__file__).parents[1] / "integrations/launches.json").read_text())

# The small Qwen3.5: vocabulary and hidden size 64, MLPs of 96; a linear layer with 2 keys and 4 values of 32, and a
# convolution of width 4; a full layer with 2 queries of 32 that have gates, and one key and value.
LINEAR = 64 * (256 + 128 + 4 + 4) + 256 * 4 + 128 * 64  # q, k, v; z; a; b; the convolution; the output
FULL = 64 * (2 * 64 + 32 + 32) + 64 * 64  # q and gate, k, v; the output
MLP = 3 * 64 * 96
VECTORS = 4 + 4 + 32 + 2 * 64 + 2 * 32 + 2 * 64 + 64  # A_log, dt_bias, norm; norms; q and k's; norms; the last norm


def work_of(kind: str, **special: Any) -> Work:
    return expect.work_of(fits.text_of(random_model(kind, **special).config))


def test_a_decoded_token_reads_all_but_the_embeddings_other_rows() -> None:
    work = work_of("qwen3_5")
    assert work.weights["bf16"] == 2 * (LINEAR + FULL + 2 * MLP + VECTORS + 64 + 64 * 64) == 184_272
    assert work.needs.weights["bf16"] == 184_272 + 2 * 63 * 64
    assert work.needs.state == 4 * 4 * 32 * 32 + 2 * 256 * 4 == 18_432
    assert work.needs.cache_per_token == 2 * 2 * 32
    assert work.moved("bf16", 9) == 184_272 + 2 * 18_432 + 10 * 128 == 222_416


def test_tied_embeddings_are_read_as_the_head() -> None:
    assert work_of("qwen3_5", tie_word_embeddings=True).weights["bf16"] == 184_272 - 2 * 64


def test_packed_weights_are_read_as_codes_scales_and_biases() -> None:
    """A group of 64 is 36 bytes in 4 bits, and 128 in bfloat16. An MLP's last matrix has 96 columns, and stays."""
    work, packed = work_of("qwen3_5"), LINEAR - 256 * 4 + FULL + 2 * 2 * 64 * 96 + 64 + 64 * 64
    assert work.weights["4 bits, groups of 64"] == 184_272 - packed // 64 * (128 - 36)


def test_a_token_reads_its_own_experts() -> None:
    all_of_them = work_of("qwen3_5_moe", num_experts=4, num_experts_per_tok=4)
    one = work_of("qwen3_5_moe", num_experts=4, num_experts_per_tok=1)
    others = 2 * 3 * 3 * 64 * 32  # two layers, three experts, three matrices
    assert all_of_them.weights["bf16"] - one.weights["bf16"] == 2 * others
    assert all_of_them.products - one.products == others
    assert all_of_them.needs == one.needs


def test_the_arithmetic_of_a_prompt() -> None:
    work = work_of("qwen3_5")
    assert work.products == LINEAR + FULL + 2 * MLP == 87_552
    assert work.rule == 3 * 4 * 32 * 32 and work.attention == 2 * 2 * 32
    assert work.prompt(10) == {
        "products": 2 * (10 * 87_552 + 64 * 64),
        "the rule": 2 * 10 * 12_288,
        "attention": 2 * 55 * 128,  # pairs of ten tokens, each with itself too
    }


def test_latent_attention_multiplies_by_keys_and_values_of_a_head() -> None:
    text = random_latent()
    heads = text.num_attention_heads
    assert expect.attention_of(text) == heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)


def random_latent() -> Any:
    from torch_gdn.integrations.transformers.small_models import make

    return fits.text_of(make("kimi_linear").config)


@pytest.mark.parametrize("model", COUNTED)
def test_launches_are_those_that_another_test_counts(model: str) -> None:
    from bench.launch_models import configuration

    text = fits.text_of(configuration(model))
    parts = {name: sum(operators.values()) for name, operators in COUNTED[model]["decode"].items()}
    layers = {name: int(result[0]) if (result := re.findall(r"^\d+", name)) else 1 for name in parts}
    counted = expect.LAUNCHES[type(text).__name__]
    linear, full = fits.layers(text, "linear_attention"), fits.layers(text, "full_attention")
    assert counted.once + linear * counted.linear_layer + full * counted.full_layer == sum(
        layers[name] * count for name, count in parts.items()
    )


SIZES = {"bf16": 10**9, "x": 4}
SOME = Work(fits.Needs(10**9, SIZES, 0, 0), SIZES, 100, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "launches", "expected"),
    [("bf16", 100, (1 / 546, "memory")), ("x", 100, (500e-6, "launches")), ("bf16", None, (1 / 546, "memory"))],
)
def test_the_longer_of_memory_and_launches_is_the_bound(
    name: str, launches: int | None, expected: tuple[float, str]
) -> None:
    mac, _ = _macs.find("M4 Max")
    seconds, what = expect.least_seconds(replace(SOME, launches=launches), name, 0, mac)
    assert (seconds, what) == (pytest.approx(expected[0], rel=1e-9), expected[1])


@pytest.mark.parametrize(
    ("text", "bandwidth", "cores", "memory"),
    [
        ("M4 Max 128", 546, 40, 128),
        ("M4 Max 36", 410, 32, 36),
        ("M4 Max", 546, 40, None),
        ("Apple M3 Max", 400, 40, None),
        ("m1 8 GB", 68, 8, 8),
        ("M3 Ultra 512GB", 819, 80, 512),
    ],
)
def test_a_mac_by_name(text: str, bandwidth: int, cores: int, memory: int | None) -> None:
    mac, result = _macs.find(text)
    assert (mac.bandwidth, mac.cores, result) == (bandwidth, cores, memory)


def test_an_unknown_mac_is_an_error_that_names_those_known() -> None:
    for text in ("M4 Maxi", "", "M", "M4 Max 128 32", "M44"):
        with pytest.raises(ValueError, match=rf"got '{text}'\. Known chips: M1, .*, M5 Max$"):
            _macs.find(text)
    with pytest.raises(ValueError, match=r"^expected M4 Max with 36, 48, 64, 128 GB, got 'M4 Max 8'$"):
        _macs.find("M4 Max 8")


def test_a_memory_size_belongs_to_one_variant() -> None:
    for chip in _macs.CHIPS:
        sizes = [size for mac in _macs.variants(chip) for size in mac.memories]
        assert len(sizes) == len(set(sizes)), chip


def test_the_command_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder's weights are read as they are: here bfloat16, so the two rows agree."""
    model = random_model("qwen3_5_moe", torch.bfloat16, num_experts=4, num_experts_per_tok=1)
    model.config.save_pretrained(tmp_path)
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    text = fits.text_of(model.config)
    work = expect.work_of(text)
    assert expect.bytes_of_files(tmp_path, text) == (work.weights["bf16"], work.needs.weights["bf16"])
    assert expect.main([str(tmp_path), "--mac", "M1 8", "--tokens", "9"]) == 0
    printed = capsys.readouterr().out
    assert "A token decoded after 9 others " in printed and "A prompt of 9 tokens " in printed
    assert "it takes 70 kernel launches: " in printed  # 40, 14 of the linear layer and 16 of the full one
    assert re.search(r"^the folder's files +0\.4 to 0\.7 +2857 +launches$", printed, flags=re.MULTILINE)
    assert expect.main([str(tmp_path)]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("M")]
    assert rows == ["Mac", *(mac.name for mac in _macs.MACS)]


def test_the_command_with_a_file_that_was_not_fetched(tmp_path: Path) -> None:
    random_model("qwen3_5").config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(
        SystemExit, match=r"model.safetensors: expected a safetensors file, got 42 bytes that begin with"
    ):
        expect.main([str(tmp_path)])


def test_the_comparison_has_the_bounds() -> None:
    """Rows of docs/compare.md with a figure in the last column are of models whose configurations are known."""
    page = (Path(__file__).parents[2] / "docs/compare.md").read_text()
    rows = re.findall(r"^\| (.*) 4 bits, (M.*?) \| .* \| (.*) \| (\d+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4
    for name, chip, measured, bound in rows:
        text = fits.text_of(fits.configuration_of(name.replace("3.6", "3.5")))  # both have the same sizes
        tokens = [int(n.replace(",", "")) for n in re.findall(r"at ([\d,]+) tokens", measured)] or [512]
        seconds, _ = expect.least_seconds(expect.work_of(text), "4 bits, groups of 64", tokens[0], _macs.find(chip)[0])
        assert bound == f"{1 / seconds:.0f}", name


def test_what_does_not_fit_has_no_time() -> None:
    """The keys and values of the token itself need memory, too."""
    mac, memory = _macs.find("M1 8")
    limit = fits.recommended(8)
    needs = replace(SOME.needs, weights={"bf16": limit, "x": limit - 1}, cache_per_token=1)
    printed = list(expect.on_one_mac(replace(SOME, needs=needs), 0, mac, memory))
    assert re.fullmatch(r"bf16 +- +- +does not fit", printed[2]) and not printed[3].endswith("fit")


def test_launches_have_a_mark() -> None:
    rows = list(expect.on_all_macs(SOME, 0))[2:]
    assert all(re.search(r"\d $|\d  +0\.5\*$", row) for row in rows), rows


def test_the_prompts_time_is_that_of_the_cores() -> None:
    """2 x 128 x 40 x 1.6 GHz is 16.384 TFLOP/s; M5's cores do four times as much."""
    work = replace(SOME, products=8_192_000_000, head=0, rule=0, attention=0)
    lines = list(expect.prompt(work, 1000, [_macs.find("M4 Max")[0], _macs.find("M5")[0]]))
    assert lines[0] == "A prompt of 1,000 tokens takes 16.38 TFLOP, most of it in products:"
    assert lines[2].endswith("at least: M4 Max, 40 GPU cores 1 s; M5, 10 GPU cores 1 s.")
