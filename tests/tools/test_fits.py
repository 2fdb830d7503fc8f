"""Tests that `python -m torch_gdn fits` counts what a model holds."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.integrations.models import KINDS, modeling_module, random_model, random_tokens
from torch_gdn import memory
from torch_gdn.integrations.transformers.small_models import make
from torch_gdn.integrations.transformers.state_pool import StatePool, StateSizes
from torch_gdn.integrations.transformers.versions import cache_in
from torch_gdn.tools import fits

pytest.importorskip("transformers")
DOCS = Path(__file__).parents[2] / "docs"
TOKENS = 70


def tensors_of(thing: Any) -> list[Tensor]:
    """Returns all tensors of a cache's layers."""
    if isinstance(thing, Tensor):
        return [thing]
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    if hasattr(thing, "__dict__"):
        values = vars(thing).values()
    return [x for value in values for x in tensors_of(value)]


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"]
)
def test_a_real_model_holds_what_is_counted(kind: str) -> None:
    if modeling_module(kind) is None:
        pytest.skip(f"this transformers has no {kind}")
    model = random_model(kind, torch.bfloat16) if kind in KINDS else make(kind).bfloat16()
    needs = fits.needs_of(model.config)
    assert needs.parameters == sum(x.numel() for x in model.parameters())
    assert needs.weights["bf16"] == sum(x.nbytes for x in model.parameters())
    cache = cache_in(model(input_ids=random_tokens(1, TOKENS), use_cache=True))
    held = sum(x.nbytes for layer in cache.layers for x in tensors_of(layer) if x.is_floating_point())
    assert held == needs.state + TOKENS * needs.cache_per_token


def test_packed_weights_are_codes_scales_and_biases() -> None:
    """64 columns in 4 bits are 32 bytes of codes, and a scale and a bias of 2 bytes each."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.Linear(40, 3, bias=False))
    sizes = {each.name: sum(each.bytes_of(x.numel(), *how) for x, how in fits.packable(layer)) for each in fits.FORMATS}
    rest = 2 * 3 + 2 * 3 * 40  # the bias, and a matrix whose columns fill no whole group
    assert sizes["4 bits, groups of 64"] == 3 * (32 + 4) + rest
    assert sizes["8 bits, groups of 64"] == 3 * (64 + 4) + rest
    assert sizes["FP8, blocks of 128 x 128"] == 3 * 64 + 3 * 40 + 2 * 4 + 2 * 3
    assert sizes["experts in 4 bits, groups of 128"] == sizes["bf16"] == 2 * 3 * 64 + rest


def test_experts_alone_are_packed() -> None:
    needs = fits.needs_of(random_model("qwen3_next", hidden_size=128, moe_intermediate_size=128).config)
    experts = 2 * 2 * 3 * 128 * 128  # layers, experts, matrices
    saved = needs.weights["bf16"] - needs.weights["experts in 4 bits, groups of 128"]
    assert saved == 2 * experts - (experts // 2 + experts // 128 * 4)


def test_the_smallest_mac() -> None:
    reported = {16: 10922.67, 32: 21845.34, 64: 49152.00, 96: 73728.00}  # MiB; recommended() has the sources
    assert {size: round(fits.recommended(size) / 2**20, 1) for size in reported} == pytest.approx(reported, abs=0.1)
    assert fits.smallest_mac(5 << 30) == 8
    assert fits.smallest_mac(24 << 30) == 36
    assert fits.smallest_mac((24 << 30) + 1) == 48
    assert fits.smallest_mac(400 << 30) is None


def test_what_metal_does_not_recommend_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "mps":
        allocated = torch.mps.current_allocated_memory()
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: allocated + 10**9)
    memory.check_memory("a pool", 10**9, device)
    if device.type != "mps":
        memory.check_memory("a pool", 10**15, device)
        return
    with pytest.raises(torch.OutOfMemoryError, match=r"^a pool: 1.00 GB needed and .+ recommends at most"):
        memory.check_memory("a pool", 10**9 + 1, device)
    sizes = StateSizes((2, 128, 128), (512, 3), torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError, match=r"^9000 slots of states: 1.21 GB needed"):
        StatePool([0], sizes, 9000, device)


def test_weights_in_a_checkpoint_have_the_models_dtype(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(7).half(),
        "c": torch.zeros(2, 4).int(),
        "d": torch.zeros(9).bool(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert memory.bytes_when_loaded([tmp_path / "model.safetensors"], torch.bfloat16) == 2 * 15 + 2 * 7 + 4 * 8 + 9


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda whole: POINTER, "a safetensors file, got 70 bytes that begin with b'version '"),
        (lambda whole: b"", "a safetensors file, got 0 bytes that begin with b''"),
        (lambda whole: whole[:20], "a safetensors file, got 20 bytes"),
        (lambda whole: whole[:-1], "a whole safetensors file of "),
        (lambda whole: whole[:8] + b"[" + whole[9:], "a safetensors file, got "),
        (lambda whole: (2).to_bytes(8, "little") + b"[]", "a safetensors file, got 10 bytes that begin with"),
        (lambda whole: (7).to_bytes(8, "little") + b'{"a":1}', "a safetensors file, got 15 bytes that begin with"),
    ],
    ids=[
        "a pointer of Git LFS",
        "an empty file",
        "a part of the header",
        "all but the last byte",
        "no JSON",
        "a list",
        "no tensor",
    ],
)
def test_a_file_that_is_no_whole_checkpoint_is_named(
    read: Callable[[bytes], bytes], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(5)}, file)
    file.write_bytes(read(file.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(f"{file}: expected {expected}")):
        memory.bytes_when_loaded([file], torch.bfloat16)


def test_the_page_and_the_readme_have_the_table() -> None:
    rows = list(fits.table())
    assert "\n".join(rows) in (DOCS / "models.md").read_text()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    result = {(model, form.split(",")[0]): mac for model, form, *_, mac in cells}
    readme = (DOCS.parent / "README.md").read_text()
    for model in {model for model, _ in result}:
        assert f"| {' | '.join([model, *(result[model, form] for form in ('bf16', '8 bits', '4 bits'))])} |" in readme


def test_the_pictures_are_those_of_the_script() -> None:
    draw = runpy.run_path(str(DOCS / "pictures/draw.py"))["PICTURES"]
    result = {path.stem: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert result == {name: picture().svg() for name, picture in draw.items()}
    assert "Qwen3-Next-80B-A3B, 4 bits: 45.8 GB" in result["fits"]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_the_command(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a model with experts has a row for packed experts."""
    random_model(kind, hidden_size=128, moe_intermediate_size=128).config.save_pretrained(tmp_path)
    assert fits.main([str(tmp_path), "--tokens", "10000000", "--requests", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 x cache of 10,000,000 tokens" in printed
    rows = [re.split(r"  +", line.partition(";")[0]) for line in printed.partition("smallest Mac\n")[2].splitlines()]
    names = [each.name for each in fits.FORMATS if kind == "qwen3_next" or not each.experts_only]
    needs = fits.needs_of(fits.configuration_of(str(tmp_path)))
    in_all = [memory.gigabytes(needs.total(name, 10**7, requests=2)) for name in names]
    assert [(name, *rest) for name, _, *rest in rows] == [(*each, "8 GB") for each in zip(names, in_all, strict=True)]
    assert needs.total("bf16", 9, 2) == needs.weights["bf16"] + 2 * (needs.state + 9 * needs.cache_per_token)


@pytest.mark.parametrize("tokens", [1, 32_768, 99_999_999_999_999])
def test_columns_stay_apart(tokens: int) -> None:
    needs = fits.Needs(10**9, {"bf16": 2 * 10**9, "8 bits, groups of 64": 10**9}, 10**6, 10**5)
    title, *rows = list(fits.report("model", needs, tokens, 1))[-3:]
    assert [len(re.split(r"  +", line)) for line in (title, *rows)] == [4] * 3
    assert len({len(line.rpartition("  ")[0]) for line in (title, *rows)}) == 1


def test_what_the_hub_logs_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, huggingface_hub logs each attempt. The error at the end is enough."""
    from transformers import AutoConfig

    log = logging.getLogger("huggingface_hub.utils._http")
    seen: list[bool] = []

    def unreachable(name: str) -> None:
        seen.append(log.isEnabledFor(logging.WARNING))
        raise OSError("We couldn't connect")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    before = log.isEnabledFor(logging.WARNING)
    with pytest.raises(SystemExit, match=r"^python -m torch_gdn fits: owner/model: We couldn't connect$"):
        fits.main(["owner/model"])
    assert seen == [False] and log.isEnabledFor(logging.WARNING) == before


def test_layers_are_divided_by_memory() -> None:
    """Each machine holds attention, and the fullest is as empty as it can be: all divisions were compared."""
    costs, attends, memories = [3, 5, 2, 4, 6, 1, 2, 3], [False, True] * 4, [20, 10, 12]
    result = fits.divide(costs, 4, 2, attends, memories)

    def fullest(parts: tuple[int, ...]) -> float:
        cuts = [0, *accumulate(parts)]
        sums = [sum(costs[a:b]) for a, b in pairwise(cuts)]
        return max((sums[0] + 4) / 20, sums[1] / 10, (sums[2] + 2) / 12)

    divisions = [
        (a, b, 8 - a - b)
        for a in range(2, 8)
        for b in range(1, 8 - a)
        if any(attends[a : a + b]) and any(attends[a + b :])
    ]
    assert result in divisions and fullest(result) == min(map(fullest, divisions))
    assert fits.divide(costs, 0, 0, [False] * 7 + [True], [10, 10]) is None


def test_parts_are_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3NextConfig

    sizes = {"hidden_size": 64, "vocab_size": 256, "num_experts": 4, "intermediate_size": 96, "head_dim": 32}
    configuration = Qwen3NextConfig(num_hidden_layers=8, num_attention_heads=2, tie_word_embeddings=True, **sizes)
    needs = fits.needs_of(configuration)
    parts = fits.parts_of(configuration, [128, 64], TOKENS, requests=3)
    assert parts is not None and parts.format.name == "bf16"
    assert sum(parts.layers) == configuration.num_hidden_layers
    tied = 256 * 64 * 2  # the last machine has the embedding too
    whole = needs.total("bf16", TOKENS, requests=3) + tied
    assert sum(parts.needed) == whole
    monkeypatch.setattr(fits, "recommended", int)  # of bytes
    for first in (whole // 10, whole // 2, whole * 9 // 10):  # enough together
        parts = fits.parts_of(configuration, [first, whole - first], TOKENS, requests=3)
        assert parts is None or parts.format.name != "bf16"
        assert parts is None or max(x - y for x, y in zip(parts.needed, [first, whole - first], strict=True)) <= 0


def test_the_command_of_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert fits.main(["Qwen3-Next-80B-A3B", "--machines", "128,64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("VLLM_PP_LAYER_PARTITION=32,16 ")]
    assert [line.endswith("--node-rank 0 --master-addr ADDRESS") for line in commands] == [True, False]
    assert [line.endswith("--node-rank 1 --master-addr ADDRESS --headless") for line in commands] == [False, True]
    assert fits.main(["Qwen3-Next-80B-A3B", "--machines", "128,64", "--tokens", "1000000", "--requests", "3"]) == 0
    parts = fits.parts_of(fits.configuration_of("Qwen3-Next-80B-A3B"), [128, 64], 10**6, 3)
    assert parts is not None and f"layers, {memory.gigabytes(parts.needed[1])} of " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no format of the weights fits on these machines together"):
        fits.main(["Qwen3-Next-80B-A3B", "--machines", "8,16"])


def test_a_model_without_the_rule_is_refused() -> None:
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match=r"expected a model with Gated DeltaNet or .+, got 'llama'"):
        fits.needs_of(LlamaConfig())


def test_the_table_is_printed_row_by_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model takes seconds to count, so its rows appear before the next one is read."""

    def rows() -> Iterator[str]:
        yield "first"
        assert capsys.readouterr().out == "first\n"
        yield "second"

    monkeypatch.setattr(fits, "table", rows)
    assert fits.main(["--table"]) == 0
    assert capsys.readouterr().out == "second\n"
