"""Tests that no replaced callable swallows an argument: an unknown one goes to transformers, once said."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from tests.integrations.models import random_model, random_tokens, torch_gdn_enabled
from torch_gdn.integrations.transformers import dispatch, known_forms, versions
from torch_gdn.integrations.transformers.calls import Binder


def run(layer: Any, x: Any, /, mask: Any = None, kv_cache: Any = None, *, scale: float = 1.0) -> Any:
    return "ours", layer, x, mask, kv_cache, scale


def passing(layer: Any, x: Any, /, mask: Any = None, **options: Any) -> Any:
    return "ours", layer, x, mask, options


def theirs(self: Any, hidden: Any, past: Any = None, mask: Any = None, window: int = 4, **kwargs: Any) -> Any:
    return "theirs"


NAMES = {"past": "kv_cache"}


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, ((1, 2), {})),
        ((1,), {"hidden": 2, "mask": 3}, ((1, 2), {"mask": 3})),
        ((1, 2, 3, 4), {}, ((1, 2), {"kv_cache": 3, "mask": 4})),  # by place, but with the original's names
        ((1, 2), {"past": 3}, ((1, 2), {"kv_cache": 3})),
        ((1, 2), {"window": 4, "other": None}, ((1, 2), {})),  # the default, and none
        ((1, 2), {"position_ids": 5, "scale": 2.0}, ((1, 2), {"scale": 2.0})),
    ],
)
def test_a_known_call(args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
    assert Binder(run, theirs, NAMES).bind(args, kwargs) == (*expected, "")


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((1, 2), {"window": 5}, "window"),
        ((1, 2), {"window": True}, "window"),
        ((1, 2), {"softcap": 0.0}, "softcap"),
        ((1, 2), {"kv_cache": 3}, "kv_cache"),  # this name of ours means something else to the original
        ((1, 2, 3, 4, 5), {}, "window"),
        ((1, 2, 3, 4, 5, 6), {}, "6"),
    ],
)
def test_an_unknown_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    assert Binder(run, theirs, NAMES).bind(args, kwargs)[2] == f"torch_gdn does not know its argument {name}"


def test_what_the_original_hands_on_is_handed_on_and_what_it_names_is_not() -> None:
    binder = Binder(passing, theirs, {})
    assert binder.bind((1, 2), {"softcap": 3.0}) == ((1, 2), {"softcap": 3.0}, "")
    assert binder.bind((1, 2), {"window": 5})[2].endswith("window")
    assert binder.bind((1, 2), {"past": 5})[2].endswith("past")


def test_another_default_of_the_original_is_passed() -> None:
    def original(self: Any, x: Any, scale: float = 0.5) -> None: ...

    assert Binder(run, original, {}).bind((1, 2), {}) == ((1, 2), {"scale": 0.5}, "")
    assert Binder(run, original, {}).bind((1, 2), {"scale": 1.0}) == ((1, 2), {"scale": 1.0}, "")


def test_a_module_around_a_function_has_the_arguments_of_the_function() -> None:
    """The package `kernels` makes such modules."""

    class Wrapper(torch.nn.Module):
        def forward(self, x: Any, y: Any, *, scale: float = 1.0, **kwargs: Any) -> Any:
            raise NotImplementedError

    assert Binder(run, Wrapper(), {}).bind((1, 2), {"scale": 0.5}) == ((1, 2), {"scale": 0.5}, "")


def test_an_argument_that_only_the_original_names_is_not_ignored() -> None:
    """A version may give a meaning to one that its functions ignored before."""

    def original(self: Any, x: Any, position_ids: Any = None, **kwargs: Any) -> None: ...

    assert Binder(run, original, {}).bind((1, 2), {"position_ids": 5})[2].endswith("position_ids")
    assert Binder(run, original, {}).bind((1, 2), {"use_cache": True})[2] == ""


@pytest.mark.parametrize("function", dispatch.FUNCTIONS)
def test_each_replaced_callable_leaves_an_unknown_argument_to_transformers(function: str) -> None:
    """It warns and is counted. Only layers that hand their options on take one that they do not name."""
    result = dispatch.FUNCTIONS[function]
    own = inspect.signature(result.run).parameters.values()
    passes_on = any(x.kind is x.VAR_KEYWORD for x in own)
    assert passes_on == (function in ("attention", "decoder_layer"))
    names = [x.name for x in own if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    text = f"def original({', '.join([*names, 'another=None', '**kwargs'])}): return 'theirs'"
    space: dict[str, Any] = {}
    exec(text, space)
    dispatch.reset_counts()
    dispatched = dispatch.dispatcher(function, space["original"], everywhere=True)
    given = torch.zeros(1, 1, 1, 8)
    with pytest.warns(UserWarning, match=rf"leaves {function} to transformers: torch_gdn does not know .* another"):
        assert dispatched(*[given for _ in names], another=1) == "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatched(*[given for _ in names], another=1) == "theirs"
    assert dispatch.fallbacks == {(function, "torch_gdn does not know its argument another"): 2}
    if not passes_on:
        with pytest.warns(UserWarning, match="does not know its argument softcap"):
            assert dispatched(*[given for _ in names], softcap=30.0) == "theirs"
    dispatch.reset_counts()


@pytest.mark.skipif(versions.minor(versions.installed()) < (5, 16), reason="this version does not decode in place")
@torch.no_grad()
def test_a_layer_with_an_unknown_argument_is_not_decoded_in_place() -> None:
    model = random_model("qwen3_next")
    layer, x = model.model.layers[0].linear_attn, torch.randn(1, 1, 64)
    with torch_gdn_enabled() as transformers, known_forms.on_every_device():
        cache = versions.cache_in(model(random_tokens(1, 5), use_cache=True))
        given = {versions.CACHE_NAMES.delta_net: cache}
        layer(x, **given, position_ids=torch.zeros(1, 1))  # as models do
        assert transformers.status().ran["gdn_decode"] == 1
        layer(x, **given, another=1)
        fallbacks = transformers.status().fallbacks
        assert fallbacks.pop("gdn_decode") == {"torch_gdn does not know its argument another": 1}
        assert fallbacks == {"fused_recurrent_gated_delta_rule": {"torch_gdn does not know its argument another": 1}}
        assert transformers.status().ran["gdn_decode"] == 1
