"""Tests continuous batching of hybrid models: the tokens equal `generate()`'s, and every slot is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import kernels_run, ready
from tests.integrations import models
from tests.integrations.models import SERVED_KINDS, random_model
from tests.integrations.serving import (
    alone,
    assert_nothing_is_held,
    assert_served_as_alone,
    managed,
    other_version,
    prompts_of,
    served,
)
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import switch
from torch_gdn.integrations.transformers.state_pool import Part, StatePool, StateSizes

if reason := other_version("continuous batching"):
    pytest.skip(reason, allow_module_level=True)

from torch_gdn.integrations.transformers import continuous_batching, paged_attention

CPU = torch.device("cpu")
LENGTHS = (5, 70, 1, 300, 33, 3, 130, 64)  # prompts that fit a batch of 64 tokens, or need up to 5 parts
each_kind = pytest.mark.parametrize("kind", SERVED_KINDS)
pytestmark = pytest.mark.usefixtures("serving")


def assert_all_taken() -> None:
    status = transformers.status()
    assert status.ran["causal_conv1d_fn"] == status.ran["chunk_gated_delta_rule"] > 0
    assert status.fallbacks == {}


@each_kind
def test_tokens_are_those_of_generate(kind: str) -> None:
    assert_served_as_alone(kind, prompts_of(*LENGTHS))
    assert_all_taken()


def test_requests_wait_for_a_slot_and_start_from_zeros_in_a_used_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "slots_and_share", lambda *_: (2, 0.0))  # memory for 2
    result = assert_served_as_alone("qwen3_5", prompts_of(*LENGTHS))
    assert result.cache.states.slots == 2


def test_prompts_first() -> None:
    """With the other scheduler, prompts come before the single tokens in a batch."""
    assert_served_as_alone("qwen3_5", prompts_of(*LENGTHS), scheduler_type="prefill_first")


def test_a_request_that_lost_its_pages_starts_again() -> None:
    """There is room for three prompts, and none for the tokens that follow them."""
    options = {"num_blocks": 6, "page_size": 16, "safety_margin": 0.0}
    assert_served_as_alone("qwen3_5", prompts_of(60, 61, 62, 63), **options)


def test_cancelled_requests_give_their_slots_back() -> None:
    assert_served_as_alone("qwen3_5", prompts_of(*LENGTHS), cancelled=(1, 3, 6))


@pytest.mark.parametrize("slots", [16, 3])
def test_forked_sequences_have_states_of_their_own(slots: int) -> None:
    """If there are few slots, some children find none and are prefilled separately."""
    prompts = prompts_of(70, 33)
    expected = alone(random_model("qwen3_5"), prompts)
    transformers.enable(continuous_batching=True)
    result = served(random_model("qwen3_5"), prompts, sequences=3, max_requests_per_batch=slots)
    children = ("", "__child#0", "__child#1")
    assert result.tokens == {f"request {n}{child}": expected[n] for n in (0, 1) for child in children}
    assert_nothing_is_held(result.cache)


def test_a_reset_cache_holds_nothing() -> None:
    transformers.enable(continuous_batching=True)
    cache = served(random_model("qwen3_5"), prompts_of(5)).cache
    cache.states.hold("left behind by a hard stop")
    cache.reset()
    assert_nothing_is_held(cache)


def test_a_question_whether_there_is_room_takes_none() -> None:
    from transformers.generation.continuous_batching.requests import RequestState

    transformers.enable(continuous_batching=True)
    cache = served(random_model("qwen3_5"), prompts_of(5)).cache
    assert cache.can_store_request_tokens(RequestState("a", [1, 2]), 2, dry_run=True)
    assert_nothing_is_held(cache)


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "longest", "slots", "share"),
    [
        (200 * GIB, 99 * GIB, 16, 0.08),  # one per request of a batch
        (200 * GIB, 4 * GIB, 4, 0.02),  # as many as Metal's longest buffer holds
        (40 * GIB, 99 * GIB, 5, 0.125),  # a quarter of half the memory
        (GIB, 99 * GIB, 1, 1.0),  # at least one
        (0, 99 * GIB, 16, 0.0),  # unknown memory
    ],
)
def test_states_take_a_part_of_the_memory(
    free: int, longest: int, slots: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = (CPU, 2 * GIB + free, 2 * GIB, GIB)
    monkeypatch.setattr(continuous_batching, "longest_buffer", lambda: longest)
    monkeypatch.setattr(continuous_batching, "get_device_and_memory_breakdown", lambda: memory)
    configuration = SimpleNamespace(max_requests_per_batch=16, max_memory_percent=0.5)
    assert continuous_batching.slots_and_share(configuration, GIB) == (slots, share)


def test_pages_take_what_the_states_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(max_memory_percent=0.5)

    def with_for_pages(cache: Any, config: Any, for_pages: Any, *_: Any, **__: Any) -> None:
        raise MemoryError(for_pages.max_memory_percent)

    monkeypatch.setattr(continuous_batching, "slots_and_share", lambda *_: (2, 0.125))
    monkeypatch.setattr(continuous_batching.paged_cache.PagedAttentionCache, "__init__", with_for_pages)
    with pytest.raises(MemoryError, match=r"0\.375"):
        continuous_batching.HybridCache(random_model("qwen3_5").config, given, CPU, SimpleNamespace(tp_size=1))
    assert given.max_memory_percent == 0.5


@pytest.mark.sweep(6)
@each_kind
def test_on_mps(kind: str) -> None:
    device = ready("mps")
    kernels = ("causal_conv1d", "causal_conv1d_update", "fused_recurrent_gated_delta_rule", "rms_norm_gated")
    with kernels_run(device, *kernels):
        assert_served_as_alone(kind, prompts_of(5, 70, 1, 20), cancelled=(3,), device="mps", num_blocks=32)
    assert_all_taken()


@pytest.mark.parametrize("ours", [True, False], ids=["to the pages", "over gathered keys"])
def test_attention(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op computes attention if it takes the heads. Otherwise transformers does, with its mask and its copies."""
    if not ours:
        monkeypatch.setattr(paged_attention, "takes", lambda _: False)
    calls = []
    op = torch_gdn.paged_attention
    monkeypatch.setattr(torch_gdn, "paged_attention", lambda *args, **options: calls.append(1) or op(*args, **options))
    result = assert_served_as_alone("qwen3_5", prompts_of(*LENGTHS))
    assert bool(calls) == ours
    assert result.cache.attends == ours
    with managed(random_model("qwen3_5")) as manager:
        assert (manager.batch_processor.inputs_and_outputs.attention_mask is None) == ours


@pytest.mark.parametrize(
    ("implementation", "size", "expected"),
    [("sdpa", 32, True), ("sdpa", 256, True), ("paged|eager", 32, False), ("sdpa", 24, False), ("sdpa", 512, False)],
)
def test_which_attention_is_ours(implementation: str, size: int, expected: bool) -> None:
    config = random_model("qwen3_5").config
    config._attn_implementation, config.head_dim = implementation, size
    assert paged_attention.takes(config) == expected


def test_eager_attention_is_transformers_own() -> None:
    prompts = prompts_of(5, 70)
    expected = alone(random_model("qwen3_5"), prompts)
    transformers.enable(continuous_batching=True)
    model = random_model("qwen3_5")
    model.set_attn_implementation("eager")
    result = served(model, prompts)
    assert not result.cache.attends
    assert [result.tokens[f"request {n}"] for n in (0, 1)] == expected


def test_what_attention_does_not_copy_is_left_to_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same memory the pages get more, because nothing of the size of batch times cache is allocated."""
    options = {"num_blocks": None, "max_memory_percent": 0.5}
    memory = (CPU, 2**27, 0, 0)
    for place in ("cache", "initialization"):
        name = f"transformers.generation.continuous_batching.{place}.get_device_and_memory_breakdown"
        monkeypatch.setattr(name, lambda: memory, raising=False)
    transformers.enable(continuous_batching=True)
    ours = served(random_model("qwen3_5"), prompts_of(5), **options).cache
    monkeypatch.setattr(paged_attention, "takes", lambda _: False)
    theirs = served(random_model("qwen3_5"), prompts_of(5), **options).cache
    assert ours.num_sectors > 2 * theirs.num_sectors


def test_models_of_attention_alone_are_transformers_own() -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    model, prompts = models.attention_model(), prompts_of(5, 70)
    expected = alone(model, prompts)
    transformers.enable(continuous_batching=True)
    result = served(model, prompts)
    assert type(result.cache) is PagedAttentionCache
    assert [result.tokens[f"request {n}"] for n in (0, 1)] == expected


def patched_places() -> dict[str, Any]:
    from transformers.generation.continuous_batching import cache, continuous_api, initialization, input_outputs
    from transformers.generation.continuous_batching.scheduler import Scheduler
    from transformers.modeling_utils import AttentionInterface

    places = (cache, continuous_api, initialization, input_outputs, Scheduler)
    result = {f"{x.__name__}.{name}": y for x in places for name, y in vars(x).items()}
    result |= {f"attention {name}": y for name, y in AttentionInterface._global_mapping.items()}
    for kind in SERVED_KINDS:
        layers = [x for name, x in vars(models.modeling_module(kind)).items() if name.endswith("DeltaNet")]
        result |= {f"{layer.__name__}.{name}": value for layer in layers for name, value in vars(layer).items()}
    return result


def test_disable_restores_continuous_batching() -> None:
    before = patched_places()
    transformers.enable()
    replaced = {place for place, value in patched_places().items() if value is not before[place]}
    assert {place.split(".")[-1] for place in replaced} == {"forward"}  # layers decode in place
    status = transformers.enable(continuous_batching=True)
    assert {"PagedAttentionCache", "sdpa"} < set(status.replaced["continuous batching"])
    assert replaced < {place for place, value in patched_places().items() if value is not before.get(place)}
    transformers.disable()
    assert patched_places() == before
    with pytest.raises(ValueError, match="Invalid layer type: linear_attention"):
        served(random_model("qwen3_5"), prompts_of(5))


def test_another_version_is_enabled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "transformers_version", lambda: "5.16.0")
    reason = "is for transformers 5.23 and 5.24, got 5.16.0"
    with pytest.warns(UserWarning, match=f"continuous batching {reason}"):
        status = transformers.enable(continuous_batching=True)
    assert status.enabled
    assert status.off == dict.fromkeys(("continuous batching", "rollback", "drafts", "packed weights"), reason)
    assert f"packed weights is off: {reason}" in str(status)
    assert "continuous batching" not in status.replaced


def test_a_manager_that_outlives_enable_says_so() -> None:
    transformers.enable(continuous_batching=True)
    with managed(random_model("qwen3_5")) as manager:
        transformers.disable()
        manager.add_request([1, 2, 3])
        assert "expected torch_gdn to stay enabled" in manager.get_result(timeout=60).error


@pytest.mark.parametrize("option", [{"use_async_batching": True}, {"cpu_offload_space": 1.0}])
def test_what_states_could_not_follow_is_refused(option: dict[str, Any]) -> None:
    transformers.enable(continuous_batching=True)
    with pytest.raises(ValueError, match=f"{next(iter(option))}: expected the option to be off"):
        served(random_model("qwen3_5"), prompts_of(5), **option)


@pytest.mark.parametrize("option", ["use_async_batching", "varlen_compile_config", "decode_compile_config"])
def test_what_transformers_turns_on_by_itself_is_refused(option: str) -> None:
    """transformers turns the option on for some devices and attentions."""
    resolved = SimpleNamespace(**{option: 1})
    with pytest.raises(ValueError, match=f"{option}: expected the option to be off, got 1"):
        continuous_batching.resolve(lambda *_: resolved, random_model("qwen3_5").config, None)


def test_a_model_without_attention_is_refused() -> None:
    """transformers has no cache without pages."""
    transformers.enable(continuous_batching=True)
    model = random_model("qwen3_5", layer_types=["linear_attention"] * 2)
    with pytest.raises(ValueError, match="layer_types: expected at least one attention layer, got none"):
        served(model, prompts_of(5))


def test_tensor_parallelism_is_refused() -> None:
    transformers.enable(continuous_batching=True)
    with pytest.raises(ValueError, match="tensor parallel size: expected 1, got 2"):
        continuous_batching.HybridCache(None, None, CPU, SimpleNamespace(tp_size=2))


SIZES = StateSizes(state=(2, 4, 3), columns=(22, 3), dtype=torch.bfloat16)


def test_the_layers_of_a_slot_do_not_overlap() -> None:
    pool = StatePool([1, 4], SIZES, 3, CPU)
    views = [tensor for layer in pool.layers.values() for tensor in (layer.states, layer.columns)]
    for number, tensor in enumerate(views, 1):
        tensor.fill_(number)
    assert [set(x.flatten().tolist()) for x in views] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert views[0].shape == (3, 2, 4, 3)
    assert views[1].shape == (3, 22, 3)


def test_a_copy_is_of_all_layers() -> None:
    pool = StatePool([1, 4], SIZES, 3, CPU)
    for layer in pool.layers.values():
        layer.states[1], layer.columns[1] = torch.randn(2, 4, 3), torch.randn(22, 3)
    pool.copy([1], [2])
    for layer in pool.layers.values():
        assert torch.equal(layer.states[2], layer.states[1])
        assert torch.equal(layer.columns[2], layer.columns[1])
        assert not layer.states[0].any()


def test_single_tokens_behind_a_past_come_first() -> None:
    pool = StatePool([0], SIZES, 8, CPU)
    parts = [Part("a", 7, 1), Part("b", 1, 1), Part("c", 0, 1), Part("d", 5, 3)]
    for part in parts:
        pool.hold(part.request)
    pool.begin_step(parts)
    step = pool.current()
    assert step.decodes == 2
    assert step.state_indices.tolist() == [0, 1, 2, 3]
    assert step.has_initial_state.tolist() == [True, True, False, True]
    assert step.cu_seqlens.tolist() == [0, 1, 2, 3, 6]
    assert step.prefill_cu_seqlens.tolist() == [0, 1, 4]


def test_a_layer_before_any_step_says_so() -> None:
    pool = StatePool([0], SIZES, 1, CPU)
    with pytest.raises(RuntimeError, match=r"begin_step\(\) before"):
        pool.layers[0].convolve(torch.zeros(1, 1, 22), torch.zeros(22, 4), None, "silu")


def test_dropout_is_refused() -> None:
    """A paged kernel has none. Nothing is stored or computed before."""
    one = torch.zeros(1, 1, 1, 32)
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.5"):
        paged_attention.attend_to_pages(None, one, one, one, cache=None, dropout=0.5)
