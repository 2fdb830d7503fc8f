"""Tests that decoding overwrites the cache's state in place only if transformers would have overwritten that tensor."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.operations import CountedOperations
from tests.integrations import models
from tests.integrations.models import KINDS, random_model, random_tokens
from tests.integrations.serving import other_version
from torch_gdn.integrations.transformers import in_place
from torch_gdn.integrations.transformers.versions import CACHE_NAMES, with_cache

if reason := other_version("decoding in place"):
    pytest.skip(reason, allow_module_level=True)

from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

CPU = torch.device("cpu")
RULE = "fused_recurrent_gated_delta_rule"
OUT_OF_PLACE, IN_PLACE = {RULE: 1}, {f"{RULE}_": 1}
TOKENS = random_tokens(2, 12)
pytestmark = pytest.mark.usefixtures("enabled")


def prompted(model: Any, cache: Any | None = None) -> Any:
    """Returns a cache after all tokens but the last."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(input_ids=TOKENS[:, :-1], use_cache=True, **with_cache(cache))
    return cache


def step(model: Any, cache: Any) -> tuple[Tensor, Counter[str]]:
    """Returns the logits of the last token, and the rules that ran."""
    with CountedOperations(lambda name, args: name.startswith(RULE)) as rules:
        output = model(input_ids=TOKENS[:, -1:], use_cache=True, **with_cache(cache))
    return output.logits, rules.calls


def state_of(cache: Any) -> Tensor:
    state: Tensor = cache.layers[0].recurrent_states[0]
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_written_where_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(kind)
    cache, other = prompted(model), prompted(model)
    state = state_of(cache)
    result, calls = step(model, cache)
    monkeypatch.setattr(in_place, "overwritten_state", lambda cache, layer_idx: None)
    expected, others = step(model, other)
    assert (calls, others) == (IN_PLACE, OUT_OF_PLACE)
    assert state_of(cache) is state
    assert torch.equal(state, state_of(other))
    assert torch.equal(result, expected)


def test_a_caller_of_the_rule_keeps_its_state() -> None:
    """No layer calls the rule here: the test calls the name in the model's module with a cache's state."""
    model = random_model("qwen3_5")
    state = state_of(prompted(model))
    kept = state.clone()
    q, g = torch.randn(2, 1, 2, 32), torch.randn(2, 1, 4)
    module: Any = models.modeling_module("qwen3_5")
    _, after = module.torch_recurrent_gated_delta_rule(
        q, q, torch.randn(2, 1, 4, 32), g=-g.abs(), beta=g, initial_state=state, output_final_state=True
    )
    assert torch.equal(state, kept)
    assert not torch.equal(after, kept)


def test_a_recording_cache_keeps_its_states() -> None:
    """`crop` may remove tokens, and then needs the state before them."""
    model = random_model("qwen3_5")
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    assert step(model, prompted(model, cache))[1] == OUT_OF_PLACE


class KeepsAll(LinearAttentionLayer):
    """A layer of a cache that continues with a new tensor, and keeps the earlier ones."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.recurrent_states[state_idx] is None:
            self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class SnapshotCache(DynamicCache):
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kw: Any) -> Tensor:
        self.layers[layer_idx].recurrent_states[state_idx] = recurrent_states
        self.layers[layer_idx].is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def another_layer(model: Any) -> Any:
    cache = prompted(model)
    cache.layers[0].__class__ = KeepsAll
    return cache


def another_class(model: Any) -> Any:
    return prompted(model, SnapshotCache(config=model.config))


def wrapped_cache(model: Any) -> Any:
    """Wraps a method of only one object, as a tool that watches it would."""
    cache = prompted(model)
    cache.update_recurrent_state = SnapshotCache.update_recurrent_state.__get__(cache)
    return cache


def wrapped_layer(model: Any) -> Any:
    cache = prompted(model)
    cache.layers[0].update_recurrent_state = KeepsAll.update_recurrent_state.__get__(cache.layers[0])
    return cache


@pytest.mark.parametrize("cache_for", [another_layer, another_class, wrapped_cache, wrapped_layer])
def test_a_cache_that_keeps_states_by_its_own_code(cache_for: Any) -> None:
    model = random_model("qwen3_5")
    cache = cache_for(model)
    before = state_of(cache)
    kept = before.clone()
    step(model, cache)
    assert torch.equal(before, kept)
    assert not torch.equal(state_of(cache), kept)


def test_a_cache_that_hands_out_something_else() -> None:
    """The cache may hold a state in another form. The rule starts from the tensor that it returns."""

    class Halved(DynamicCache):
        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            state = super().get_recurrent_state(layer_idx, state_idx)
            return None if state is None else state / 2

    model = random_model("qwen3_5")
    cache, other = prompted(model, Halved(config=model.config)), prompted(model)
    state_of(other).div_(2)
    result, calls = step(model, cache)
    assert calls == OUT_OF_PLACE
    assert torch.equal(result, step(model, other)[0])


def test_grad_mode_computes_out_of_place() -> None:
    model = random_model("qwen3_5").requires_grad_(False)
    cache = prompted(model)
    with torch.enable_grad():
        assert step(model, cache)[1] == OUT_OF_PLACE


def test_states_of_another_batch_are_refused_and_kept() -> None:
    model = random_model("qwen3_5")
    cache = prompted(model)
    state = state_of(cache)
    kept = state.clone()
    layer = model.model.layers[0].linear_attn
    for columns in cache.layers[0].conv_states:
        cache.layers[0].conv_states[columns] = cache.layers[0].conv_states[columns][:1]
    with pytest.raises(ValueError, match="initial_state"):
        layer(torch.randn(1, 1, model.config.hidden_size), **{CACHE_NAMES.delta_net: cache})
    assert torch.equal(state, kept)


def test_a_state_in_another_dtype_is_rounded_by_the_cache() -> None:
    model = random_model("qwen3_5")
    cache = prompted(model)
    cache.layers[0].recurrent_states[0] = state_of(cache).double()
    assert step(model, cache)[1] == OUT_OF_PLACE


def test_packed_boundaries_are_heard() -> None:
    model = random_model("qwen3_5")
    cache = DynamicCache(config=model.config)
    model(input_ids=TOKENS[:1, :-1], use_cache=True, **with_cache(cache))
    with CountedOperations(lambda name, args: name.startswith(RULE)) as rules:
        model(input_ids=TOKENS[:1, -1:], cu_seq_lens_q=torch.tensor([0, 1]), **with_cache(cache))
    assert rules.calls == OUT_OF_PLACE


def test_a_rule_that_was_rebound_is_given_no_option_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = random_model("qwen3_5"), []
    cache = prompted(model)
    module: Any = models.modeling_module("qwen3_5")
    rule = module.torch_recurrent_gated_delta_rule

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(set(kwargs))
        return rule(*args, **kwargs)

    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", watched)
    step(model, cache)
    [options] = seen
    assert in_place.CACHED_STATE not in options


def test_copies_of_a_cache_are_their_own() -> None:
    """A prefix is kept, and continued more than once."""
    model = random_model("qwen3_5")
    prefix = prompted(model)
    kept = state_of(prefix).clone()
    result = [step(model, copy.deepcopy(prefix)) for _ in range(2)]
    assert result[0][1] == IN_PLACE
    assert torch.equal(result[0][0], result[1][0])
    assert torch.equal(state_of(prefix), kept)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_prompt_do_not_meet(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(kind)

    def generated() -> list[list[int]]:
        torch.manual_seed(0)
        tokens: Tensor = model.generate(TOKENS[:1], max_new_tokens=8, pad_token_id=0, **options)
        return tokens.tolist()

    with CountedOperations(lambda name, args: name.startswith(RULE)) as rules:
        result = generated()
    assert rules.calls == {f"{RULE}_": 7}
    monkeypatch.setattr(in_place, "overwritten_state", lambda cache, layer_idx: None)
    assert result == generated()


def test_a_compiled_layer_writes_only_into_states_that_it_may_overwrite() -> None:
    """The graph for one cache is not used for a cache that must keep its states."""
    model = random_model("qwen3_5")
    layer = model.model.layers[0].linear_attn
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(2, 1, model.config.hidden_size)
    for cache_for, rule in ((prompted, f"{RULE}_"), (another_class, RULE), (another_layer, RULE)):
        cache, other = cache_for(model), cache_for(model)
        before, kept = state_of(cache), state_of(cache).clone()
        result, expected = compiled(x, **{CACHE_NAMES.delta_net: cache}), layer(x, **{CACHE_NAMES.delta_net: other})
        targets = {str(node.target).rpartition(".")[2] for node in graphs[-1].graph.nodes}
        assert {RULE, f"{RULE}_"} & targets == {rule}
        assert torch.equal(before, kept) == (rule == RULE)
        assert torch.equal(result, expected)
        assert torch.equal(state_of(cache), state_of(other))
