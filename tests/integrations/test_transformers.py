"""Compares transformers' models on torch_gdn with the same models on transformers' own PyTorch fallback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import DEVICES, kernels_run, ready
from tests.helpers.prefill import ALGORITHMS, on_mps
from tests.integrations import models
from tests.integrations.models import KINDS, PROMPT, QUESTIONS, distance, random_model, torch_gdn_enabled
from torch_gdn.integrations.transformers.functions import FUNCTIONS
from torch_gdn.tools.prefill import prefill_algorithm

CPU = torch.device("cpu")
# The limit of the logits' relative distance in f32. The largest of any model, version and question was 9e-7. A decay
# one percent off gives at least 3.7e-5 (the last test).
BAR = 4e-6
KERNELS = (
    "fused_chunk_gated_delta_rule",  # for a prompt of 17 tokens
    "gdn_decode or fused_recurrent_gated_delta_rule",  # depends on model and version
    "causal_conv1d",
    "causal_conv1d_update",
    "rms_norm_gated",
)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_question = pytest.mark.parametrize("question", QUESTIONS)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def model_or_skip(kind: str, *args: Any, **special: Any) -> Any:
    if not models.available(kind):
        import transformers

        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return random_model(kind, *args, **special)


FORWARDS = {"prefill": (1, 0), "decode": (1, 3), "continuation": (3, 1), "short_prompt": (1, 2), "padded": (1, 0)}


def on_torch_gdn(question: str, model: Any, device: torch.device = CPU) -> torch.Tensor:
    """Returns the answer. Asserts that torch_gdn took every call of the one GDN layer."""
    with torch_gdn_enabled() as transformers:
        answer = QUESTIONS[question](model, device)
        status = transformers.status()
    prompts, steps = FORWARDS[question]
    calls = {
        "chunk_gated_delta_rule": prompts,
        "fused_recurrent_gated_delta_rule": steps,
        "rms_norm_gated": prompts + steps,
    }
    if (
        "OlmoHybridShortConvolution.forward" in status.replaced.get("olmo_hybrid", ())
        and "Olmo" in type(model).__name__
    ):
        calls |= {"short_convolution": 3 * (prompts + steps)}  # q, k and v each have one
    else:
        calls |= {"causal_conv1d_fn": prompts, "causal_conv1d_update": steps}
    assert status.ran == {function: number for function, number in calls.items() if number}
    assert status.fallbacks == {}
    return answer


@each_question
@each_kind
def test_logits_in_f32_are_those_of_the_fallback(kind: str, question: str) -> None:
    model = model_or_skip(kind)
    expected = QUESTIONS[question](model, CPU)
    assert distance(on_torch_gdn(question, model), expected) < BAR


@pytest.mark.sweep(4)
@each_question
@each_kind
def test_logits_in_bf16_are_as_near_to_f32_as_the_fallback(kind: str, question: str) -> None:
    model = model_or_skip(kind, torch.bfloat16)
    exact = QUESTIONS[question](random_model(kind), CPU)
    fallback = distance(QUESTIONS[question](model, CPU), exact)
    assert distance(on_torch_gdn(question, model), exact) < 1.1 * fallback


@each_kind
def test_greedy_generation_gives_the_tokens_of_the_fallback(kind: str) -> None:
    model = model_or_skip(kind)
    expected = models.generated(model, CPU)
    with torch_gdn_enabled() as transformers:
        tokens = models.generated(model, CPU)
        ran = transformers.status().ran
    assert ran["chunk_gated_delta_rule"] == 1
    assert ran["fused_recurrent_gated_delta_rule"] == tokens.shape[1] - 20 - 1
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("heads", [(1, 3, 40, 24), (30, 30, 8, 16)], ids=["ratio 3", "30 heads"])
@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid"])
def test_other_heads(kind: str, heads: tuple[int, int, int, int]) -> None:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    model = model_or_skip(kind, **dict(zip(names, heads, strict=True)))
    expected = models.decode(model, CPU)
    assert distance(on_torch_gdn("decode", model), expected) < BAR


@each_kind
def test_left_padding_changes_nothing_for_the_padded_prompt(kind: str) -> None:
    model = model_or_skip(kind)
    tokens, _ = models.padded_tokens((20, 9))
    with torch_gdn_enabled():
        together = models.padded(model, CPU, (20, 9))[20:]
        alone = model(input_ids=tokens[1:, 11:], use_cache=False).logits[0]
    assert distance(together, alone) < BAR


@pytest.mark.sweep(4)
@each_kind
def test_on_mps_prefill_and_decode_run_the_kernels(kind: str) -> None:
    model, device = model_or_skip(kind), ready("mps")
    expected = models.decode(model, CPU, prompt=17, steps=(1,))
    model = copy.deepcopy(model).to(device)
    with torch_gdn_enabled() as transformers, kernels_run(device, *KERNELS):
        result = models.decode(model, device, prompt=17, steps=(1,))
        assert transformers.status().fallbacks == {}
    assert distance(result, expected) < BAR


SHORT, LONG = 8, 389
SHIPPED = {SHORT: "recurrent", 12: "fused_chunk", PROMPT: "fused_chunk", LONG: "chunked"}  # by longest prompt
PROMPTS = {
    "one": (PROMPT,),
    "two": (PROMPT, PROMPT),
    "padded": (PROMPT, 9),
    "short": (SHORT,),
    "short and padded": (SHORT, 5),
    "a dozen and padded": (12, 5),
    "long": (LONG,),
    "long and padded": (LONG, 70),
}


def shipped(kind: str, prompts: str) -> tuple[str, ...]:
    """Returns the default algorithm's kernels. The simulated GPU has 8 cores, so up to 4 threadgroups are chunked."""
    if prompts == "long and padded" or (kind, prompts) == ("olmo_hybrid", "long"):  # 8 or 12; 6
        return ALGORITHMS["fused_chunk"]
    return ALGORITHMS[SHIPPED[max(PROMPTS[prompts])]]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("prompts", PROMPTS)
@each_kind
def test_on_mps_the_algorithm_as_shipped(kind: str, prompts: str) -> None:
    model, device = model_or_skip(kind), ready("mps")
    expected = models.padded(model, CPU, PROMPTS[prompts])
    model = copy.deepcopy(model).to(device)
    with torch_gdn_enabled() as transformers, kernels_run(device, *shipped(kind, prompts), "rms_norm_gated"):
        result = models.padded(model, device, PROMPTS[prompts])
        assert transformers.status().fallbacks == {}
    assert distance(result, expected) < BAR


@pytest.mark.parametrize("prompts", ["one", "padded"])
@on_mps("chunked", "recurrent")
def test_on_mps_other_algorithms(device: torch.device, prompts: str) -> None:
    model = model_or_skip("qwen3_5")
    expected = models.padded(model, CPU, PROMPTS[prompts])
    model = copy.deepcopy(model).to(device)
    with torch_gdn_enabled():
        result = models.padded(model, device, PROMPTS[prompts])
    assert distance(result, expected) < BAR


@pytest.mark.sweep(6)
@pytest.mark.parametrize("prompts", ["one", "padded", "a dozen and padded", "long"])
@each_kind
def test_on_mps_in_bf16(kind: str, prompts: str) -> None:
    """A dozen tokens run the algorithm for few. Fewer tokens would give too few values to compare with the fallback."""
    few = prompts == "a dozen and padded"
    kernels = ALGORITHMS["recurrent"] if few else shipped(kind, prompts)
    device, model = ready("mps"), model_or_skip(kind, torch.bfloat16)
    exact = models.padded(random_model(kind), CPU, PROMPTS[prompts])
    fallback = distance(models.padded(model, CPU, PROMPTS[prompts]), exact)
    model = copy.deepcopy(model).to(device)
    with (
        torch_gdn_enabled(),
        prefill_algorithm("recurrent" if few else None),
        kernels_run(device, *kernels, "causal_conv1d", "rms_norm_gated"),
    ):
        result = models.padded(model, device, PROMPTS[prompts])
    assert distance(result, exact) < 1.1 * fallback


@pytest.mark.sweep(8)
@pytest.mark.parametrize("prompts", ["two", "padded", "short and padded", "long"])
@pytest.mark.parametrize("name", DEVICES)
def test_a_compiled_layer(name: str, prompts: str) -> None:
    device, model = ready(name), model_or_skip("qwen3_5")
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    _, mask = models.padded_tokens(PROMPTS[prompts])
    hidden, seen = torch.randn(*mask.shape, 64), mask.bool()
    expected = layer(hidden, attention_mask=mask)[seen]
    layer = copy.deepcopy(layer).to(device)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch_gdn_enabled() as transformers, kernels_run(device, *shipped("qwen3_5", prompts)):
        result = compiled(hidden.to(device), attention_mask=mask.to(device))
        assert not transformers.status().ran  # a graph does not count
    assert result.isfinite().all()
    assert distance(result[seen.to(device)], expected) < BAR


def with_another_decay(rule: Any) -> Any:
    return lambda q, k, v, g, *others, **options: rule(q, k, v, g * 1.01, *others, **options)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@each_kind
def test_the_bar_sees_a_decay_one_percent_off(kind: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_or_skip(kind)
    expected = models.decode(model, CPU)
    for name in (function, f"{function}_"):  # it may update a cache's state in place
        monkeypatch.setattr(torch_gdn, name, with_another_decay(getattr(torch_gdn, name)))
    assert distance(on_torch_gdn("decode", model), expected) > 5 * BAR


def test_packed_sequences_do_not_see_each_other() -> None:
    """Flash attention's keyword arguments pass them to a layer. Without a kernel, transformers refuses them."""
    model = model_or_skip("qwen3_5")
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    hidden = torch.randn(1, 75, 64)
    cu_seqlens, numbers = torch.tensor([0, 66, 75], dtype=torch.int32), (torch.arange(75) >= 66).int()[None]
    with torch_gdn_enabled() as transformers:
        packed = layer(hidden, cu_seq_lens_q=cu_seqlens, seq_idx=numbers)
        apart = torch.cat([layer(hidden[:, :66]), layer(hidden[:, 66:])], 1)
        assert transformers.status().fallbacks == {}
    assert distance(packed, apart) < BAR


def test_cu_seqlens_alone_keep_convolutions_apart() -> None:
    columns, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    run = FUNCTIONS["causal_conv1d_fn"].run
    packed = run(columns, weight, activation="silu", cu_seq_lens_q=torch.tensor([0, 5, 9]))
    apart = torch.cat([run(x, weight, activation="silu") for x in columns.split([5, 4], 2)], 2)
    assert torch.equal(packed, apart)
