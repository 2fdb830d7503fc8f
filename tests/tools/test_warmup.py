from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import ready
from tests.helpers.layer import between_projections
from torch_gdn import _C
from torch_gdn.integrations.transformers.versions import with_cache
from torch_gdn.tools.prefill import prefill_algorithm

SHAPE = (1, 2, 40, 24)  # no other test has these head sizes


def names() -> set[str]:
    return {facts["name"] for facts in _C.pipelines()}


def test_compiles_what_calls_need() -> None:
    device = ready("mps")
    compiled = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert compiled and set(compiled) <= names()
    before = names()
    q, v, g = torch.ones(1, 70, 1, 40), torch.ones(1, 70, 2, 24), torch.zeros(1, 70, 2)
    inputs = [x.to(device) for x in (q, q, v, g)]
    torch_gdn.chunk_gated_delta_rule(*inputs, beta=inputs[-1], use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch_gdn.fused_recurrent_gated_delta_rule(*inputs, beta=inputs[-1], use_qk_l2norm_in_kernel=True)
    assert names() == before


@pytest.mark.sweep(1, seeds=3)
def test_a_layer_of_a_warm_shape_compiles_nothing_and_launches_what_was_compiled() -> None:
    """The launches are those of every call that the docstring names. The heuristic chooses a chunk's algorithm."""
    device, shape = ready("mps"), (1, 2, 48, 28)
    _C.clear_pipelines()
    with prefill_algorithm(None):
        compiled = torch_gdn.warmup([shape], device=device, dtypes=[torch.float32], progress=False)
        before, launched = names(), set()
        weight = torch.zeros(2 * 48 + 2 * 28, 4, device=device)
        for T in (1, 2, 16, 400):
            for state_v_first in (False, True):
                x = torch.ones(1, T, len(weight), device=device)
                between_projections(x, weight, shape, state_v_first=state_v_first)
                with torch_gdn.recording() as recorded:
                    between_projections(x, weight, shape, state_v_first=state_v_first)
                launched |= {variant.name for variant in recorded.variants}
    assert names() == before
    assert launched <= set(compiled)
    unused = {name.split("_float")[0] for name in set(compiled) - launched}
    rule = "fused_recurrent_gated_delta_rule"
    assert unused <= {"causal_conv1d_state", "causal_conv1d_update", rule, f"{rule}_token"}


def test_compiles_nothing_twice() -> None:
    device = ready("mps")
    torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False) == []


def test_has_nothing_to_compile_on_the_cpu() -> None:
    assert torch_gdn.warmup([SHAPE], device="cpu", progress=False) == []


@pytest.mark.sweep(1, seeds=3)
def test_shows_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    compiled = torch_gdn.warmup([(1, 1, 20, 12)], device=ready("mps"), dtypes=[torch.float32])
    assert f"{len(compiled)}/{len(compiled)}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((1, 2, 257, 64), torch.float32, ValueError, "K"),
        ((2, 3, 64, 64), torch.float32, ValueError, "multiple"),
        ((1, 2, 64, 64), torch.float64, TypeError, "dtype"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_refuses_what_the_ops_refuse(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        torch_gdn.warmup([shape], device=ready(device), dtypes=[dtype], progress=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("Qwen/Qwen3.5-0.8B",),
            "model_or_shapes: expected a model, or a list of (H, HV, K, V), such as [(16, 32, 128, 128)]",
        ),
        (([(16, 32)],), "model_or_shapes: expected a model, or a list of (H, HV, K, V)"),
        (((16, 32, 128, 128),), "model_or_shapes: expected a model, or a list of (H, HV, K, V)"),
        (({"H": 16},), "model_or_shapes: expected a model, or a list of (H, HV, K, V)"),
        ((None,), "model_or_shapes: expected a model, or a list of (H, HV, K, V)"),
        (
            ([SHAPE], "cpu", ["bfloat16"]),
            "dtypes: expected a list of dtypes, such as [torch.bfloat16], got ['bfloat16']",
        ),
        (([SHAPE], "cpu", "bfloat16"), "dtypes: expected a list of dtypes, such as [torch.bfloat16], got 'bfloat16'"),
        (
            ([SHAPE], "cpu", torch.bfloat16),
            "dtypes: expected a list of dtypes, such as [torch.bfloat16], got torch.bfloat16",
        ),
    ],
)
def test_arguments_of_another_kind_are_named(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TypeError, match=f"^warmup: {re.escape(words)}"):
        torch_gdn.warmup(*arguments)


def test_without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^warmup: device: .*got mps: this PyTorch has no mps device"):
        torch_gdn.warmup([SHAPE])


def test_pipelines_have_facts() -> None:
    torch_gdn.warmup([SHAPE], device=ready("mps"), dtypes=[torch.float32], progress=False)
    for facts in _C.pipelines():
        assert facts["compile_seconds"] >= 0
        assert facts["thread_execution_width"] == 32
        assert 32 <= facts["max_total_threads_per_threadgroup"] <= 1024
        assert 0 <= facts["static_threadgroup_memory_length"] <= 32768


def generate(model: Any, length: int, **options: Any) -> None:
    ids = torch.ones(1, length, dtype=torch.long, device="mps")
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **options)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    models = pytest.importorskip("tests.integrations.models")
    with models.torch_gdn_enabled():
        yield models.random_model("qwen3_next", torch.bfloat16, linear_key_head_dim=36, head_dim=64).to(ready("mps"))


@pytest.mark.sweep(1, seeds=3)
def test_generation_of_a_warm_model_compiles_nothing_more(model: Any) -> None:
    """Prompts of many lengths compile nothing, and launch everything that was compiled."""
    _C.clear_pipelines()
    with prefill_algorithm(None), torch.no_grad():
        compiled = torch_gdn.warmup(model, progress=False)
        assert names() == set(compiled)
        for kernel in ("causal_conv1d_", "causal_conv1d_update_", "rms_norm_gated_", "fused_chunk_", "chunk_fwd_h_"):
            assert any(name.startswith(kernel) for name in compiled), kernel
        with torch_gdn.recording() as recorded:
            for length in (1, 3, 20, 70, 400):
                generate(model, length)
        assert {variant.name for variant in recorded.variants} == set(compiled)
        generate(model, 40)
    assert names() == set(compiled)


def test_a_model_with_a_cache_of_aura_codes(model: Any) -> None:
    aura = pytest.importorskip("torch_gdn.integrations.transformers.aura")
    _C.clear_pipelines()
    before = model.config._attn_implementation
    model.set_attn_implementation("aura")
    try:
        compiled = torch_gdn.warmup(
            model, progress=False, longest_prompt=20, cache=lambda: aura.AuraCache(model.config, "4v2", tail=2)
        )
        attention = ("paged_attention_prefill", "aura_rotate", "aura_flash_p1", "aura_flash_exact", "aura_flash_p2")
        for kernel in ("aura_encode", *attention):
            assert any(name.startswith(f"{kernel}_bfloat_") or name.startswith(f"{kernel}_4_2_") for name in compiled)
        warm = names()
        for length in (1, 6, 20):
            generate(model, length, **with_cache(aura.AuraCache(model.config, "4v2", tail=2)))
        assert names() == warm
    finally:
        model.set_attn_implementation(before)


def test_a_model_on_the_cpu_has_nothing_to_compile() -> None:
    assert torch_gdn.warmup(torch.nn.Linear(2, 2)) == []


def test_cleared_pipelines_are_compiled_again() -> None:
    device = ready("mps")
    first = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    _C.clear_pipelines()
    assert _C.pipelines() == []
    again = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert set(first) <= set(again)


def test_the_device_has_facts() -> None:
    ready("mps")
    facts = _C.device_facts()
    assert facts["name"] and facts["core_count"] > 0
    assert facts["max_threadgroup_memory_length"] == 32768
    assert facts["max_buffer_length"] > 0 and facts["recommended_max_working_set_size"] > 0
