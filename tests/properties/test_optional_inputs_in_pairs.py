"""Tests every op with each optional argument present and absent, alone and together with each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import DEVICES
from tests.helpers.entries import algorithms_of
from tests.helpers.pairwise import pairwise
from tests.helpers.variations import assert_exact_everywhere, plans, random_of, some
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, empty_on
from torch_gdn_check.registry.registry import OpEntry

ABSENT = object()
CASES = 3  # of the pairs' cases of each plan
# Values for options that the registry's points omit. Its references know these.
SCALARS: dict[str, Any] = {
    "scale": 0.3,
    "lower_bound": -5.0,
    "window": 9,
    "eps": 1e-2,
    "norm_eps": 1e-2,
    "scoring": "sigmoid",
    "n_group": 2,
    "head_grouping": "tiled",
}
# State and order of the tokens are those of the call's tensors.
OF_ROWS = {"exact_sinks", "tail", "exact_length"}  # with other exact rows these are 0
OF_SHAPES = {
    "return_rstd",
    "state_v_first",
    "heads_first",
    "rotated",
    "inverse",
    "output_final_state",
    "return_intermediate_states",
}


def value_of(name: str, declared: str, call: Call) -> Any:
    """Returns a value for an argument that the call omits, or ABSENT."""
    if name in OF_SHAPES:
        return ABSENT
    if name == "window" and "q_rot" in call:
        return ABSENT  # of a block of which no key is visible, m may be any low number
    if name in SCALARS:
        return SCALARS[name]
    if declared == "bool":
        return True
    heads = call["q"].shape[1] if "q" in call and call["q"].dim() in (3, 4) else 0
    if name == "sinks" and heads:
        return torch.linspace(-1, 1, heads)
    if name == "bias" and "scales" in call:
        return torch.linspace(-1, 1, len(call["weight"]))
    if name == "correction_bias":
        return torch.randn(call["router_logits"].shape[1])
    if name == "residual" and "w_down" in call:
        return torch.randn(len(call["hidden"]), call["w_down"].shape[1]).to(call["hidden"].dtype)
    if name in ("A_log", "dt_bias", "gk", "gv") and "v" in call:
        return rule_output(name, call)
    if name == "seq_idx":
        return torch.arange(call["x"].shape[1]).div(3, rounding_mode="floor").expand(call["x"].shape[:2])
    return ABSENT


def rule_output(name: str, call: Call) -> Tensor:
    """Returns gates of each head, or of each channel of its keys or values."""
    batch, tokens, heads, V = call["v"].shape
    K = call["k"].shape[-1]
    if name == "A_log":
        return torch.linspace(-3, 1, heads)
    if name == "dt_bias":
        has_channels = call["g"].dim() == 4
        return torch.linspace(-4, 1, heads * K if has_channels else heads)
    return -torch.rand(batch, tokens, heads, K if name == "gk" else V)


def factors_of(entry: OpEntry[Any], call: Call) -> dict[str, list[Any]]:
    """Returns both values of each option: absent or the default, and the call's or another one."""
    result: dict[str, list[Any]] = {}
    for each in entry.overload._schema.arguments:
        if not each.has_default_value() or each.name in OF_SHAPES or each.name.endswith("dtype"):
            continue
        if each.name in call:
            value = call[each.name]
            default = ABSENT if value is None or isinstance(value, Tensor) else each.default_value
            default = 0 if each.name in OF_ROWS else default
            result[each.name] = [value, not value if isinstance(value, bool) else default]
        elif (value := value_of(each.name, str(each.type), call)) is not ABSENT:
            result[each.name] = [ABSENT, value]
    return result


def refused(entry: OpEntry[Any], call: Call) -> str:
    """Returns the argument that the op refuses, or an empty string."""
    try:
        entry.overload(**empty_on(call, "meta"))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error).removeprefix("gdn::").partition(": ")[2].partition(":")[0]
    return ""


def repaired(entry: OpEntry[Any], call: Call, case: Call, factors: dict[str, list[Any]]) -> Call | None:
    """Returns the call with the case's options, or None if the op takes no such call.

    An option that another one needs or forbids changes until the op takes all of them.
    """
    for _ in range(2 * len(factors) + 1):
        changed = {name: x for name, x in (call | case).items() if x is not ABSENT}
        wrong = refused(entry, changed)
        if not wrong:
            return changed
        if wrong not in factors:
            return None
        current = (call | case).get(wrong, ABSENT)
        case = case | {wrong: next((x for x in factors[wrong] if x is not current), ABSENT)}
    return None


def options_of(call: Call, names: dict[str, list[Any]]) -> tuple[Any, ...]:
    return tuple(str(call.get(name)) if not isinstance(call.get(name), Tensor) else name for name in names)


RULES = [op for op, entry in REGISTRY.items() if {"q", "g"} <= set(entry.arguments)]
OPTIONAL = [op for op, entry in REGISTRY.items() if op not in RULES and factors_of(entry, entry.smallest())]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("op", OPTIONAL)
def test_options(op: str) -> None:
    entry, seen = REGISTRY[op], set[Any]()
    first, *others = plans(op)
    for point in (first, *some(others, 1, "options", op)):
        base = entry.call(point)
        factors = factors_of(entry, base)
        one = [{name: value} for name, values in factors.items() for value in values]
        chosen = {name: values for name, values in factors.items() if name not in OF_ROWS}
        cases = pairwise(chosen) if len(chosen) > 1 else one or [{}]
        for case in some(cases, CASES, "options", point.name):
            call = repaired(entry, base, case, factors)
            key = (point, options_of(call, factors) if call else None)
            if call is not None and key not in seen:
                seen.add(key)
                assert_exact_everywhere(entry, point, call, f"options {sorted(call.keys() & factors.keys())}")
    assert seen


@pytest.mark.sweep(1)
@pytest.mark.parametrize("op", RULES)
def test_options_of_the_rules(op: str) -> None:
    """Each pair of options takes kernels of its own on mps, so that one case of a run compiles them there."""
    entry, draw = REGISTRY[op], random_of("options", op)
    algorithms = algorithms_of(op) if "return_intermediate_states" in entry.arguments else (None,)
    small = replace(entry.small, K=16, V=8)
    base, computed = entry.call(small), 0
    factors = factors_of(entry, base)
    one = [{name: value} for name, values in factors.items() for value in values]
    for case in some(pairwise(factors) if len(factors) > 1 else one, CASES, "options", op):
        call = repaired(entry, base, case, factors)
        if call is None:
            continue
        point = replace(small, algorithm=draw.choice(algorithms))
        devices = ("cpu",) if computed else DEVICES
        what = f"options {sorted(call.keys() & factors.keys())}"
        computed += assert_exact_everywhere(entry, point, call, what, devices=devices)
    assert computed
