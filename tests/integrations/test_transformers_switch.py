"""Tests enable(), disable(), status() and supports() by themselves."""

from __future__ import annotations

import copy
import doctest
import gc
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.devices import ready
from tests.integrations import models
from tests.integrations.models import KINDS, distance, random_model
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import dispatch, refusal, supports, switch
from torch_gdn.integrations.transformers.calls import binder_of
from torch_gdn.integrations.transformers.functions import FUNCTIONS
from torch_gdn.integrations.transformers.patches import CONVOLVING_MODELS, KDA_MODELS

CPU = torch.device("cpu")
EVERYWHERE = list(KINDS)
OTHERS = ("GGUF", "experts", "quantised weights", "memory")  # status() says that these are replaced


@pytest.fixture(autouse=True)
def _off_at_both_ends() -> Iterator[None]:
    transformers.disable()
    yield
    transformers.disable()


def everything() -> dict[str, Any]:
    """Returns all names of the models' modules and of their classes."""
    result: dict[str, Any] = {}
    for kind in EVERYWHERE:
        module = models.modeling_module(kind)
        assert module is not None
        result |= {f"{kind}.{name}": value for name, value in vars(module).items()}
        classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
        result |= {f"{kind}.{x.__name__}.{name}": value for x in classes for name, value in vars(x).items()}
    return result


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    ignored = ("__abstractmethods__", "_abc_impl")  # looking at a class makes these
    names = before.keys() | after.keys()
    return {x for x in names if before.get(x) is not after.get(x) and not x.endswith(ignored)}


def test_disable_restores_everything() -> None:
    before = everything()
    transformers.enable()
    assert differing(before, everything())
    transformers.disable()
    assert differing(before, everything()) == set()


def test_enabling_replaces_what_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(switch.self_test, "load", lambda: asked.append(True))
    monkeypatch.setitem(switch.self_test.replaced, "l2norm", "y: error 1; the CPU's kernel runs instead, on copies")
    status = transformers.enable()
    assert asked == [True]
    assert str(status).endswith("l2norm failed the self-test: y: error 1; the CPU's kernel runs instead, on copies")


def test_enabling_twice_is_enabling_once() -> None:
    before = everything()
    transformers.enable()
    once = everything()
    transformers.enable()
    assert differing(once, everything()) == set()
    transformers.disable()
    assert differing(before, everything()) == set()


def test_a_mistyped_option_is_an_error_that_names_the_options() -> None:
    with pytest.raises(TypeError, match=r"enable: continous_batching: expected continuous_batching, rollback or"):
        transformers.enable(continous_batching=True)  # type: ignore[call-arg]


def test_status_says_what_is_replaced() -> None:
    status = transformers.enable()
    assert status.enabled
    assert status.transformers == importlib.metadata.version("transformers")
    assert list(status.replaced)[: len(EVERYWHERE)] == EVERYWHERE
    assert set(status.replaced) - {*EVERYWHERE} <= {*CONVOLVING_MODELS, *KDA_MODELS, *OTHERS}
    for names in (status.replaced[kind] for kind in EVERYWHERE):
        assert any("chunk_gated_delta_rule" in name for name in names)
        assert any("recurrent_gated_delta_rule" in name for name in names)
    assert f"torch_gdn is enabled for transformers {status.transformers}\nqwen3_next: " in status.details()
    assert "qwen3_next" not in str(status)
    assert not transformers.disable().replaced


@pytest.mark.skipif(
    importlib.metadata.version("transformers").startswith("4."),
    reason="transformers 4 does not count a model's bytes before loading",
)
def test_a_model_above_metals_recommendation_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready("mps")
    model = random_model("qwen3_5")
    model.save_pretrained(tmp_path)
    needed = sum(x.nbytes for x in model.parameters())
    allocated = torch.mps.current_allocated_memory()
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: allocated)

    def load(spare: int) -> Any:
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: allocated + needed + spare)
        return type(model).from_pretrained(tmp_path, device_map="mps", dtype=torch.float32)

    transformers.enable()
    with pytest.raises(torch.OutOfMemoryError, match=r"^the weights of Qwen3_5ForCausalLM: .+ recommends"):
        load(-1)
    assert load(0).device.type == "mps"
    transformers.disable()
    load(-1)


@torch.no_grad()
def test_the_first_line_counts_the_layers_that_ran() -> None:
    gc.collect()
    before = transformers.status().layers  # other tests hold models too
    model, another = random_model("qwen3_next"), random_model("qwen3_next")  # built before enable()
    mine = sum(type(layer).__name__ == "Qwen3NextGatedDeltaNet" for layer in model.modules())
    layers = f"{before + 2 * mine} Gated DeltaNet layers"
    assert f"{layers} run on transformers' own code: call torch_gdn.enable()" in str(transformers.status())
    result = transformers.enable()
    assert mine > 0 and result.running == 0 and result.layers == before + 2 * mine
    assert str(result).startswith(f"torch_gdn is enabled, and none of {layers} has run since")
    for _ in range(2):
        models.decode(model, CPU)
        assert transformers.status().running == mine
    assert str(transformers.status()).startswith(f"{mine} of {layers} ran on torch_gdn; 0 calls")
    models.decode(copy.deepcopy(another), CPU)
    assert transformers.status().running == mine  # the copy is gone
    assert transformers.disable().running == 0


@torch.no_grad()
def test_a_compiled_layer_is_one_graph() -> None:
    model = random_model(EVERYWHERE[-1])
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    hidden = torch.randn(1, 70, 64)
    expected = layer(hidden)
    transformers.enable()
    torch.compiler.reset()
    result = torch.compile(layer, fullgraph=True, backend="aot_eager")(hidden)
    assert distance(result, expected) < 4e-6
    assert not transformers.status().ran  # a graph does not count


@pytest.mark.parametrize("why", ["long heads", "another dtype"])
@torch.no_grad()
def test_a_model_whose_rule_was_left_is_not_counted(why: str) -> None:
    """Norms and convolutions of the model may run on torch_gdn."""
    kind = "qwen3_5" if "qwen3_5" in EVERYWHERE else "qwen3_next"
    model = random_model(kind, **{"linear_key_head_dim": 288} if why == "long heads" else {})
    model = model.double() if why == "another dtype" else model
    expected = models.prefill(model, CPU)
    transformers.enable()
    with pytest.warns(UserWarning, match="^torch_gdn leaves"):
        result = models.prefill(model, CPU)
    assert why == "long heads" or torch.equal(result, expected)
    status = transformers.status()
    assert status.running == 0
    assert str(status).startswith("0 of ") and "chunk_gated_delta_rule: 1 calls went to transformers: " in str(status)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", EVERYWHERE)
@torch.no_grad()
def test_a_model_built_while_enabled_is_transformers_own_afterwards(kind: str) -> None:
    transformers.enable()
    built_enabled = random_model(kind)
    assert transformers.status().ran == {}
    models.decode(built_enabled, CPU)
    ran = transformers.status().ran
    assert ran["chunk_gated_delta_rule"] == 1
    transformers.disable()
    result = models.decode(built_enabled, CPU)
    assert transformers.status().ran == ran
    assert torch.equal(result, models.decode(random_model(kind), CPU))


@torch.no_grad()
def test_counts_start_anew_at_enable_and_stay_after_disable() -> None:
    model = random_model("qwen3_next")
    transformers.enable()
    models.prefill(model, CPU)
    assert transformers.disable().ran["chunk_gated_delta_rule"] == 1
    assert transformers.enable().ran == {}


def test_a_name_that_was_rebound_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.enable()
    patch = switch.applied["qwen3_next"][0]

    def another() -> None: ...

    monkeypatch.setattr(patch.owner, patch.name, another)
    with pytest.warns(UserWarning, match=f"does not restore .*{patch.name}"):
        transformers.disable()
    assert vars(patch.owner)[patch.name] is another
    setattr(patch.owner, patch.name, patch.replacement)  # so that monkeypatch does not restore our function
    patch.revert()
    monkeypatch.undo()
    if patch.original is not vars(patch.owner).get(patch.name):
        setattr(patch.owner, patch.name, patch.original)


def test_training_is_taken() -> None:
    model = random_model("qwen3_next")
    tokens = models.random_tokens(1, 10)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return model.model.layers[0].linear_attn.A_log.grad.clone()

    expected = gradient()
    transformers.enable()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result, again = gradient(), gradient()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(again, result)
    assert not [x for x in warned if "torch_gdn" in str(x.message)]
    status = transformers.status()
    assert status.ran.keys() == {"causal_conv1d_fn", "chunk_gated_delta_rule", "rms_norm_gated"}
    assert not status.fallbacks


def test_without_transformers_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="expected transformers to be installed: pip install 'transformers>="):
        transformers.enable()


def test_a_version_without_the_models_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "modeling_module", lambda model: None)
    with pytest.raises(ImportError, match=r"expected a transformers that has one of qwen3_next, .*, got "):
        transformers.enable()
    assert not transformers.status().enabled


def test_a_version_that_names_the_functions_otherwise_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "patches_of", lambda module: iter(()))
    with pytest.warns(UserWarning, match=r"has another name for the delta rule of \w+"):
        transformers.enable()


@pytest.mark.parametrize("object", [supports, transformers.enable])
def test_the_examples_run(object: Any) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(object, object.__name__, globs={})
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def zeros(*sizes: int, **options: Any) -> torch.Tensor:
    return torch.zeros(sizes, **options)


def rule(**different: Any) -> dict[str, Any]:
    query, gates = zeros(1, 4, 2, 8), zeros(1, 4, 4)
    return {"query": query, "key": query, "value": zeros(1, 4, 4, 8), "g": gates, "beta": gates} | different


def convolution(**different: Any) -> dict[str, Any]:
    return {"hidden_states": zeros(1, 6, 5), "weight": zeros(6, 4), "activation": "silu"} | different


def update(**different: Any) -> dict[str, Any]:
    return convolution(hidden_states=zeros(1, 6, 1), conv_state=zeros(1, 6, 4)) | different


def norm(layer: dict[str, Any] | None = None, **different: Any) -> dict[str, Any]:
    parts = {"weight": torch.ones(8), "variance_epsilon": 1e-6, "activation": "silu"} | (layer or {})
    rows = {"hidden_states": zeros(3, 8), "gate": zeros(3, 8)}
    return {"layer": SimpleNamespace(**parts)} | rows | different


def short(dtype: torch.dtype = torch.float32, **different: Any) -> dict[str, Any]:
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, bias=False).requires_grad_(False)
    return {"layer": layer, "hidden_states": zeros(1, 5, 6, dtype=dtype)} | different


BF16, F64, WHOLE = torch.bfloat16, torch.float64, torch.int64
CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "chunk_gated_delta_rule": rule,
    "fused_recurrent_gated_delta_rule": rule,
    "causal_conv1d_fn": convolution,
    "causal_conv1d_update": update,
    "rms_norm_gated": norm,
    "short_convolution": short,
}
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"use_cache": True, "position_ids": None},  # these are arguments of other layers
    {"initial_state": zeros(1, 4, 8, 8)},
    {"initial_state": zeros(1, 4, 8, 8, dtype=BF16)},
    {"cu_seqlens": torch.tensor([0, 1, 4]), "seq_idx": torch.tensor([[0, 1, 1, 1]])},
    {"g": zeros(1, 4, 4, dtype=BF16)},
)
TAKEN: dict[str, tuple[dict[str, Any], ...]] = {
    "chunk_gated_delta_rule": RULES,
    "fused_recurrent_gated_delta_rule": RULES,
    "causal_conv1d_fn": (
        {},
        {"bias": zeros(6), "activation": None},
        {"cu_seq_lens_q": torch.tensor([0, 1, 5]), "use_cache": False},
        {"seq_idx": torch.tensor([[0, 1, 1, 1, 1]]), "cu_seq_lens_q": torch.tensor([0, 1, 5])},
    ),
    "causal_conv1d_update": ({},),
    "rms_norm_gated": (
        {"layer": {"weight": torch.ones(8, requires_grad=True)}},
        *({"layer": {"activation": activation}} for activation in ("silu", "swish", "sigmoid")),
    ),
    "short_convolution": ({"cache": zeros(1, 6, 3), "use_precomputed": True},),
}
ELSEWHERE = {name: x.to("meta") for name, x in rule().items()}
TRAINED = "grad mode is on and an input requires grad"
LEFT: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "chunk_gated_delta_rule": (
        (ELSEWHERE, "the tensors are on meta; torch_gdn has"),
        ({"g": zeros(1, 4, 4, device="meta")}, "the tensors are on several devices"),
        ({"query": zeros(1, 4, 2, 8, dtype=F64)}, "q: expected dtype "),
        ({"value": zeros(1, 4, 4, 8, dtype=BF16)}, "query and value have the dtypes float32 and bfloat16"),
        ({"key": zeros(1, 4, 2, 8, dtype=BF16)}, "k: expected dtype "),
        ({"beta": zeros(1, 4, 4, dtype=WHOLE)}, "beta: expected a floating dtype"),
        (dict.fromkeys(("query", "key"), zeros(1, 4, 2, 257)), "expected K from 1 to 256, got 257"),
        ({"value": zeros(1, 4, 4, 513)}, "expected V from 1 to 512, got 513"),
        ({"value": zeros(1, 4, 3, 8)}, "v: expected a number of heads that is a multiple of the 2 of q, got 3"),
        ({"query": zeros(4, 2, 8)}, "q: expected 4 dimensions [B, T, H, K], got 3"),
        ({"key": zeros(1, 4, 3, 8)}, "[1, 1, 2, 8], got [1, 1, 3, 8] for one token of one sequence"),
        ({"chunk_size": 48}, "chunk_size: expected 16, 32 or 64, got 48"),
        ({"initial_state": zeros(1, 4, 8, 8, dtype=WHOLE)}, "initial_state: expected a floating dtype"),
        ({"seq_idx": torch.tensor([[0, 1, 1, 1]])}, "packed sequences have seq_idx but no"),
        (
            {"query": zeros(2, 4, 2, 8), "cu_seqlens": torch.tensor([0, 4])},
            "expected a batch of 1 (sequences packed along T), got a batch of 2",
        ),
    ),
    "causal_conv1d_fn": (
        ({"hidden_states": zeros(1, 6, 5, device="meta"), "weight": zeros(6, 4, device="meta")}, "meta"),
        ({"weight": zeros(6, 4, dtype=F64)}, "weight: expected dtype "),
        ({"weight": zeros(6, 4, dtype=BF16)}, "weight"),
        ({"bias": zeros(6, dtype=torch.float16)}, "bias: expected dtype "),
        ({"weight": zeros(6, 5)}, "weight: expected W from 2 to 4, got 5"),
        ({"hidden_states": zeros(6, 5)}, "x: expected 3 dimensions [B, T, D], got 2"),
        ({"activation": "gelu"}, "activation: expected "),
        ({"seq_idx": zeros(1, 5)}, "seq_idx: expected dtype "),
    ),
    "fused_recurrent_gated_delta_rule": (({"value": zeros(1, 4, 4, 8, requires_grad=True)}, TRAINED),),
    "causal_conv1d_update": (({"conv_state": zeros(1, 6, 4, dtype=WHOLE)}, "state_pool: expected dtype "),),
    "short_convolution": (
        ({"cache": zeros(1, 6, 3, dtype=F64)}, "initial_state: expected dtype "),
        ({"dtype": F64}, "x: expected dtype "),
    ),
    "rms_norm_gated": (
        ({"gate": None}, "the gated norm has no gate"),
        ({"gate": zeros(3, 8, dtype=F64)}, "g: expected dtype "),
        ({"gate": zeros(1, 8)}, "input and gate have the shapes [3, 8] and [1, 8]"),
        ({"layer": {"activation": "gelu"}}, "activation: expected "),
        (
            {"layer": {"weight": zeros(16385)}, **dict.fromkeys(("hidden_states", "gate"), zeros(1, 16385))},
            "x: expected a last dimension from 1 to 16384, got 16385",
        ),
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("function", "different"), [(name, x) for name, calls in TAKEN.items() for x in calls])
def test_supports(function: str, different: dict[str, Any]) -> None:
    call = CALLS[function](**different)
    assert supports(function, **call) == (True, "")
    rows = call.get("value", call.get("hidden_states"))
    layer = [call.pop("layer")] if "layer" in call else []
    options, unknown = binder_of(FUNCTIONS[function], FUNCTIONS[function].run).bind(tuple(layer), call)[1:]
    y = FUNCTIONS[function].run(*layer, **options)  # and it does
    assert not unknown
    assert rows is not None and (y[0] if isinstance(y, tuple) else y).shape == rows.shape


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("function", "different", "reason"), [(name, *x) for name, calls in LEFT.items() for x in calls]
)
def test_supports_gives_its_reason(function: str, different: dict[str, Any], reason: str) -> None:
    supported, result = supports(function, **CALLS[function](**different))
    assert not supported and reason in result


def test_the_gated_norm_of_a_long_row_runs_on_the_cpu_alone() -> None:
    for device, expected in (("cpu", ""), ("mps", "x: expected a last dimension of at most 1024 on mps, got 1025")):
        long = {name: zeros(1, 1025).to(ready(device)) for name in ("hidden_states", "gate")}
        call = CALLS["rms_norm_gated"](layer={"weight": zeros(1025).to(device)}, **long)
        assert supports("rms_norm_gated", **call) == (not expected, expected)


def test_supports_refuses_an_unknown_function() -> None:
    with pytest.raises(ValueError, match=r"supports: function: expected one of chunk_gated_delta_rule, .*, got 'conv'"):
        supports("conv")


def test_supports_names_the_function_whose_arguments_are_missing() -> None:
    error = "supports: arguments of chunk_gated_delta_rule: missing a required argument: 'value'"
    with pytest.raises(TypeError, match=f"^{error}$"):
        supports("chunk_gated_delta_rule", 1, 2)


def test_modes_do_not_see_the_question() -> None:
    seen: list[Any] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    query, g = torch.zeros(1, 4, 2, 73), torch.zeros(1, 4, 2)  # no other test has this head size
    with Recorder():
        assert supports("chunk_gated_delta_rule", query, query, query, g, g) == (True, "")
    assert seen == []


def test_an_op_is_asked_once_for_prompts_of_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(refusal, "refused", lambda op, **call: asked.append(op) or "")
    for tokens in (1, 70, 4096):
        query, g = torch.zeros(1, tokens, 2, 71), torch.zeros(1, tokens, 2)  # no other test has this head size
        assert supports("chunk_gated_delta_rule", query, query, query, g, g) == (True, "")
    assert asked == ["chunk_gated_delta_rule"]


@torch.no_grad()
def test_a_compiled_layer_that_is_left_to_transformers() -> None:
    """The reason for leaving it is a constant of the graph."""
    transformers.enable()
    dispatched = dispatch.dispatcher("chunk_gated_delta_rule", lambda query, *others, **more: query + 1)
    call = rule(chunk_size=48)
    torch.compiler.reset()
    result = torch.compile(dispatched, fullgraph=True, backend="aot_eager")(**call)
    assert torch.equal(result, call["query"] + 1)


@pytest.mark.skipif(
    importlib.metadata.version("transformers").startswith("4."),
    reason="transformers 4 does not count a model's bytes before loading",
)
def test_a_model_for_a_device_that_is_absent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("qwen3_5")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    transformers.enable()
    with pytest.raises(RuntimeError, match=r'^the weights of Qwen3_5ForCausalLM: .+ no mps device.+device_map="cpu"'):
        type(model).from_pretrained(tmp_path, device_map="mps")
    assert type(model).from_pretrained(tmp_path, device_map="cpu").device.type == "cpu"
