"""Binds the calls of what torch_gdn replaces in transformers, so that no argument is lost.

A replaced callable has a function `run` that takes its place. `run` names each argument that it understands. An
argument that it does not name is unknown, unless it is None or has the default of the original: the call then goes to
the original. There are two exceptions, and neither holds for an argument that the original names:

- `run` has **options because the original hands its own on in the same way, which a trial proves.
- A model hands `PASSED_BY_MODELS` to each of its layers, whose functions ignore those that they do not name.

Arguments of `run` before a "/" have another name in each model, and are known by their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_gdn.integrations.transformers.versions import CACHE_NAMES

if TYPE_CHECKING:
    from torch_gdn.integrations.transformers.functions import Function

# The arguments of transformers' TransformersKwargs and FlashAttentionKwargs, those of `generate` that reach the layers,
# and those of continuous batching. A function of states or convolutions in any tested version ignores them.
PASSED_BY_MODELS = frozenset(
    {
        "block_table",
        "cache",
        "cache_position",
        "cached_state",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "read_index",
        "return_dict",
        "seq_idx",
        "use_cache",
        "write_index",
    }
)
PLAIN = (bool, int, float, str)  # types that are compared with a default
Parameter = inspect.Parameter
BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def is_same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, PLAIN) and type(value) is type(default) and bool(value == default))


Bound = tuple[tuple[Any, ...], dict[str, Any], str]  # the arguments of `run`, or the reason why it takes none


class Binder:
    """Translates a call of `original` into one of `run`.

    Args:
        run: what takes the call's place. Its first arguments are matched by place.
        original: what is replaced.
        names: the arguments that `run` calls otherwise, by transformers' name.
        ignored: arguments that the original names and that have no effect.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        original: Callable[..., Any],
        names: Mapping[str, str],
        ignored: Collection[str] = (),
    ) -> None:
        ours = parameters_of(run)
        theirs = parameters_of(original)
        self.passes_on = any(x.kind is Parameter.VAR_KEYWORD for x in ours)
        self.by_place = [x.name for x in ours if x.kind is Parameter.POSITIONAL_ONLY]
        by_name = [x for x in ours if x.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
        self.own_names = {x.name: x.name for x in by_name if x.name not in names.values()}  # by transformers' name
        self.own_names |= {name: own for name, own in names.items() if own in {x.name for x in by_name}}
        self.defaults = {x.name: x.default for x in theirs if x.kind not in VARIABLE}
        self.ignored = {name for name in ignored if name in self.defaults} | (PASSED_BY_MODELS - self.defaults.keys())
        self.places = [x.name for x in theirs if x.kind in BY_PLACE]
        own_defaults = {x.name: x.default for x in by_name}
        self.filled = {  # where the original has another default than `run`
            own: default
            for name, default in self.defaults.items()
            if (own := self.own_names.get(name))
            and default is not Parameter.empty
            and not is_same(default, own_defaults[own])
        }

    def bind(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> Bound:
        if len(args) > len(self.places):
            return (), {}, f"torch_gdn does not know its argument {len(self.places) + 1}"
        pending = {**dict(zip(self.places, args, strict=False)), **given}
        first = []
        for place in self.places[: len(self.by_place)]:
            if place not in pending:
                break
            first.append(pending.pop(place))
        kwargs = dict(self.filled)
        for name, value in pending.items():
            own = self.own_names.get(name)
            if own is not None:
                kwargs[own] = value
            elif self.passes_on and name not in self.defaults:
                kwargs[name] = value
            elif not (value is None or is_same(value, self.defaults.get(name)) or name in self.ignored):
                return (), {}, f"torch_gdn does not know its argument {name}"
        return tuple(first), kwargs, ""


def binder_of(function: Function, original: Callable[..., Any]) -> Binder:
    names = dict(function.names)
    if function.cache_of:
        names[getattr(CACHE_NAMES, function.cache_of)] = "kv_cache"
    return Binder(function.run, original, names, function.ignored)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns no names for a function that does not tell its arguments.

    The package `kernels`, where it is installed, makes a module of each function that it may replace.
    """
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
