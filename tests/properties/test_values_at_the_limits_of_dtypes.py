"""Tests every op with the largest and the smallest numbers, equal numbers and rows of zeros, at each place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import DEVICES
from tests.helpers.entries import fields_of
from tests.helpers.variations import attempt, plans, size_of, some
from torch_gdn_check.registry import REGISTRY, bounds
from torch_gdn_check.registry.inputs import Call, is_floating, tensors_of
from torch_gdn_check.registry.registry import Named, OpEntry

Change = Callable[[Tensor], Tensor]


def placed(x: Tensor, place: float, number: float) -> Tensor:
    """Returns a copy with the number at a place between the first, 0, and the last, 1."""
    copy = x.clone()
    flat = copy.flatten()
    flat[round(place * (flat.numel() - 1))] = number
    return flat.view(x.shape)


def row(x: Tensor, number: float) -> Tensor:
    """Returns a copy whose middle row has this number everywhere."""
    copy = x.clone().reshape(-1, x.shape[-1]) if x.dim() > 1 else x.clone().view(1, -1)
    copy[len(copy) // 2] = number
    return copy.view(x.shape)


def changes_of(dtype: torch.dtype, largest: float) -> dict[str, Change]:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return {
        "the first largest": lambda x: placed(x, 0, largest),
        "the middle one least": lambda x: placed(x, 0.5, -largest),
        "the last largest": lambda x: placed(x, 1, largest),
        "small ones": lambda x: placed(placed(placed(x, 0, info.smallest_normal), 0.5, least), 1, -least),
        "a row of the largest": lambda x: row(x, largest),
        "a row of the lowest": lambda x: row(x, -largest),
        "a row of subnormal numbers": lambda x: row(x, least),
        "a row of zeros": lambda x: row(x, 0.0),
        "equal numbers": lambda x: torch.full_like(x, 0.5),
        "zeros": lambda x: torch.zeros_like(x),
    }


def moved(entry: OpEntry[Any], call: Call, exact: Named) -> Named:
    """Returns how far the exact outputs move if each input moves by the rounding of float32, either way.

    A sum of terms that cancel moves further than its own rounding, and a number between two codes takes another code.
    """
    farthest: Named = {}
    for _ in range(MOVES):
        signs = {name: torch.randint(0, 2, call[name].shape) * 2 - 1 for name in tensors_of(call)}
        wide = {name: call[name].double() * (1 + x * 2.0**-24) for name, x in signs.items() if is_floating(call[name])}
        for name, x in entry.exact_outputs(call | wide).items():
            distance = (x.double() - exact[name].double()).abs().nan_to_num(torch.inf)
            farthest[name] = distance.maximum(farthest.get(name, distance))
    return farthest


def wrong(name: str, x: Tensor, exact: Tensor, bound: float, distance: Tensor | None) -> str:
    """Returns how an output is wrong, or an empty string. Each number must be within the bound of the exact one,
    relative to the largest of its row, and of `distance`. A number that its dtype does not hold is infinite, or so is
    one of the sum's terms.
    """
    if not x.is_floating_point():
        same = x if distance is None else x.where(distance == 0, exact)
        return "" if bounds.differing(name, same, exact, bound).kept else "integers differ"
    wide = exact.double()
    if (x.isnan() & ~wide.isnan()).any():
        return "NaN"
    error = (x.double() - wide).abs().where(wide.to(x.dtype).isfinite(), 0.0)
    sizes = [wide.abs(), torch.zeros_like(wide) if distance is None else MOST_MOVED * distance]
    row = tuple(range(x.dim())) if name in WHOLE else -1
    size, more = (each.amax(row, keepdim=True) if x.dim() and x.numel() else each for each in sizes)
    least = max(torch.finfo(x.dtype).smallest_normal, 2.0**-120) * (1 if x.dtype != torch.float16 else 2.0**-10)
    allowed = max(8 * bound, 4 * torch.finfo(x.dtype).eps) * size + more + least
    return "" if (error <= allowed).all() else f"{(error - allowed).max():.3g} too much of {size.max():.3g}"


WHOLE = {"dweight", "dinitial_state"}  # each number of a row has terms of its own, which cancel
MOVES = 8
MOST_MOVED = 8  # times the distance, because a kernel rounds more often than once
CHEAP = 2000  # numbers of the small call
# These are exponents, or their products are.
EXPONENTS = {"q", "k", "q_rot", "key_cache", "key_norms", "key_tile_means", "tile_scores", "exact_keys", "new_keys"}
EXPONENTS |= {"sinks", "m_partials", "g", "gk", "gv", "beta", "A_log", "dt_bias", "a", "b", "qkv", "z", "conv_pool"}
TABLES = ("signs", "codebook", "boundaries", "l_partials")  # ends of names; their values are made by other ops
FEW, ALL = 3, 120  # changes of a tensor in a run, or of all tensors together if calls are cheap
# test_values_of_the_rules.py has the rules, whose states depend on all tokens before.
FLOATING = [
    op
    for op, entry in REGISTRY.items()
    if any(map(is_floating, entry.smallest().values())) and not {"K", "V"} <= fields_of(entry)
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("op", FLOATING)
def test_values(op: str) -> None:
    entry = REGISTRY[op]
    calls = [(point, entry.call(point)) for point in some(plans(op), 4, "values", op)]
    names = {name: None for _, call in calls for name in tensors_of(call) if is_floating(call[name])}
    names = {name: None for name in names if not name.endswith(TABLES)}
    is_slow = size_of(calls[0][1]) > CHEAP or "trellis" in fields_of(entry)
    count = FEW if is_slow else ALL // len(names)
    for name in names:
        having = [each for each in calls if is_floating(each[1].get(name))]
        cases = [*itertools.product(having, changes_of(torch.float32, 1.0))]
        for (point, call), what in some(cases, count, "values", op, name):
            assert_exact_with(entry, point, call, name, what)


def assert_exact_with(entry: OpEntry[Any], point: Any, call: Call, name: str, what: str) -> None:
    change = changes_of(call[name].dtype, largest(entry.name, name, call[name].dtype))[what]
    assert_values(entry, point, call | {name: change(call[name])}, f"{name}: {what}")


def assert_values(entry: OpEntry[Any], point: Any, changed: Call, what: str, devices: Sequence[str] = DEVICES) -> None:
    """Asserts that each number of the call's outputs is near float64."""
    exact = entry.exact_outputs(changed)
    allowed = entry.bound(point, changed, exact)
    for device in devices:
        result = attempt(entry, point, changed, device)
        assert not isinstance(result, str), result
        assert result.keys() == exact.keys()
        distances: Named = {}
        for output, x in result.items():
            bound = allowed.get(output, bounds.ROUNDING.get(x.dtype, 0.0))
            if wrong(output, x, exact[output], bound, None):
                distances = distances or moved(entry, changed, exact)
                why = wrong(output, x, exact[output], bound, distances[output])
                assert not why, f"{entry.name} on {device}, {what}, at {point.name}: {output}: {why}"


def largest(op: str, name: str, dtype: torch.dtype) -> float:
    """Returns the largest number that an argument may have next to others of the usual size.

    float32 holds the squares of 2^60. The encoder takes any number. A difference of scores is an exponent, so that an
    error relative to large scores would be a large one of the result.
    """
    if name in EXPONENTS:
        return 2.0
    return torch.finfo(dtype).max if dtype == torch.float16 or op.startswith("aura_encode") else 2.0**60
