"""Checkpoints with quantised weights on mps: the tokens are those of transformers with the same weights as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.tests.vllm.conftest import (
    CHUNKS,
    GREEDY_TOKENS,
    HERE,
    assert_tokens_agree,
    environment,
    run_engines,
    scenario,
)
from tests.helpers.packed_models import PLAIN, Format, packed_model
from tests.helpers.small_models import adapter_of, generated, model_of, prompts
from tests.helpers.wide import assert_loading_takes_little

ALIGNED = {"max_num_batched_tokens": 512, "enable_prefix_caching": True, "mamba_cache_mode": "align"}
TEXTS, CLIENTS = prompts(6, 130), prompts(32, 130)
EXPERTS_ONLY = rf"{PLAIN}|self_attn|linear_attn|shared_expert"  # as published files of mixtures have it


def packed(family: str, how: Format, folder: Path, name: str) -> tuple[Path, Path]:
    """The packed model, and its weights as numbers."""
    return packed_model(model_of(family, folder), how, folder / f"{family} {name}")


def at_once(model: Path, texts: list[Any], *rounds: dict[str, Any], **options: Any) -> dict[str, Any]:
    return scenario(model, texts, *rounds, max_num_seqs=len(texts), **options)


DENSE = {
    "compressed-tensors": ("qwen3_5_mtp", Format("compressed-tensors", is_ordered=True)),
    "gptq": ("qwen3_5", Format("gptq", bits=8, is_symmetric=True, is_ordered=True)),
    "awq": ("qwen3_5", Format("awq")),
    "auto-round": ("qwen3_5", Format("auto-round")),
    "fp8": ("qwen3_5", Format("fp8")),
    "mlx": (
        "qwen3_5",
        Format("mlx", plain="conv1d", eight="o_proj", wrapped=True),
    ),  # the embedding, which is the head too, is packed
}
MANY = ("compressed-tensors", "awq")  # served to 32 clients


def test_dense_models(folder: Path) -> None:
    """One drafts by its packed prediction layer, one has adapters, one reads its second round from cached prefixes, and
    one is the text part of a model that sees.
    """
    models = {name: packed(family, how, folder, name) for name, (family, how) in DENSE.items()}
    texts = {name: CLIENTS if name in MANY else TEXTS for name in models}
    wanted = {name: [generated(numbers, texts[name], GREEDY_TOKENS)[0]] for name, (_, numbers) in models.items()}
    scenarios = {name: at_once(model, TEXTS, **CHUNKS) for name, (model, _) in models.items()}
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    drafted = at_once(models["compressed-tensors"][0], CLIENTS, **CHUNKS, speculative_config=drafts)
    scenarios["compressed-tensors"] = drafted
    scenarios["awq"] = at_once(models["awq"][0], CLIENTS, {}, {}, **ALIGNED)
    scenarios["mlx"]["options"]["hf_overrides"] = {"architectures": ["Qwen3_5ForCausalLM"]}
    wanted["awq"] *= 2
    adapter, merged = adapter_of(models["gptq"][1], folder / "qwen3_5 gptq", 1)
    options = {**CHUNKS, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    adapters = [str(adapter), None] * (len(TEXTS) // 2)
    scenarios["gptq"] = at_once(models["gptq"][0], TEXTS, {}, {"adapters": adapters}, **options)
    adapted = generated(merged, TEXTS, GREEDY_TOKENS)[0]
    assert adapted != wanted["gptq"][0]
    wanted["gptq"].append([(adapted if i % 2 == 0 else wanted["gptq"][0])[i] for i in range(len(TEXTS))])

    results = dict(zip(scenarios, run_engines("mps", list(scenarios.values())), strict=True))
    assert {name: [each["tokens"] for each in result["rounds"]] for name, result in results.items()} == wanted
    assert results["awq"]["rounds"][1]["cached"][1] > 0
    assert results["compressed-tensors"]["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    for result in results.values():
        assert result["compiled late"] == []
        assert any(name.startswith("quantized_linear") for name in result["kernels"])


MIXTURES = {
    "compressed-tensors": ("qwen3_next_moe", Format("compressed-tensors", bits=8, group=None, is_symmetric=True)),
    "gptq": ("qwen3_5_moe", Format("gptq", is_symmetric=True, is_second=True, plain=EXPERTS_ONLY, wrapped=True)),
    "awq": ("qwen3_next_moe", Format("awq", plain=PLAIN.replace("|lm_head", ""))),  # the head is packed
    "auto-round": ("qwen3_5_moe", Format("auto-round", plain=EXPERTS_ONLY, is_packed_as_awq=True)),
    "fp8": ("qwen3_5_moe", Format("fp8", wrapped=True)),
    "mlx": ("qwen3_next_moe", Format("mlx", plain="conv1d", eight=r"\.gate$|shared_expert")),
}


def test_mixtures_of_experts(folder: Path) -> None:
    """Experts alone, or with the other layers and the shared expert. 32 clients are served by a model that sees."""
    models = {name: packed(family, how, folder, name) for name, (family, how) in MIXTURES.items()}
    texts = {name: CLIENTS if how.wrapped else TEXTS for name, (_, how) in MIXTURES.items()}
    wanted = {name: generated(numbers, texts[name], GREEDY_TOKENS)[0] for name, (_, numbers) in models.items()}
    scenarios = {name: at_once(model, texts[name], **CHUNKS) for name, (model, _) in models.items()}
    for name in ("gptq", "fp8"):
        scenarios[name]["options"] |= {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    results = run_engines("mps", list(scenarios.values()))
    got = {name: result["rounds"][0]["tokens"] for name, result in zip(models, results, strict=True)}
    assert got == wanted
    assert [result["compiled late"] for result in results] == [[]] * len(results)
    assert all(any(name.startswith("moe_gate_up") for name in result["kernels"]) for result in results)


def test_bfloat16_differs_only_where_two_tokens_are_close(folder: Path) -> None:
    """Scales are float16 in the file."""
    model, numbers = packed("qwen3_5", Format("gptq", is_symmetric=True), folder, "bfloat16")
    tokens, margins = generated(numbers, TEXTS, GREEDY_TOKENS, "bfloat16")
    (result,) = run_engines("mps", [at_once(model, TEXTS, **CHUNKS, dtype="bfloat16")])
    assert_tokens_agree(result["rounds"][0]["tokens"], tokens, margins, 0.15)
    assert result["compiled late"] == []


@pytest.mark.parametrize("form", ["awq", "fp8, fused"])
def test_loading_holds_little_more_than_the_file(form: str, tmp_path: Path) -> None:
    """A worker loads the file. Experts in one tensor are cut into each."""
    assert_loading_takes_little(HERE / "loading.py", form, tmp_path, environment("mps"))
