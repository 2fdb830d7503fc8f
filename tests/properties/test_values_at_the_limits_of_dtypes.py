"""Tests every op with the largest and the smallest numbers, equal numbers and rows of zeros, at each place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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


def assert_rows_are_exact(found: Named, exact: Named, allowed: dict[str, float], what: str) -> None:
    """Asserts that each number is within the bound of the exact one, relative to the largest of its row.

    A number that its dtype does not hold is infinite, or so is one of the sum's terms.
    """
    assert found.keys() == exact.keys(), what
    for name, x in found.items():
        bound = allowed.get(name, bounds.ROUNDING.get(x.dtype, 0.0))
        if not x.is_floating_point():
            assert bounds.differing(name, x, exact[name], bound).kept, f"{what}: {name}"
            continue
        wide = exact[name].double()
        rounded = wide.to(x.dtype)
        fits = rounded.isfinite()
        assert not (x.isnan() & ~wide.isnan()).any(), f"{what}: {name} is NaN"
        error = (x.double() - wide).abs().where(fits, 0.0)
        size = wide.abs()
        if x.dim():
            size = size.amax(tuple(range(x.dim())) if name in WHOLE else -1, keepdim=True) if x.numel() else size
        least = max(torch.finfo(x.dtype).smallest_normal, 2.0**-120) * (1 if x.dtype != torch.float16 else 2.0**-10)
        more = max(8 * bound, 4 * torch.finfo(x.dtype).eps, CANCELLING * 2.0**-24) * size + least
        assert (error <= more).all(), f"{what}: {name}: {(error - more).max():.3g} too much of {size.max():.3g}"


CANCELLING = 256  # times the rounding of float32, because a sum of equal terms with signs is smaller than its terms
WHOLE = {"dweight", "dinitial_state"}  # each number of a row has terms of its own, which cancel
CHEAP = 2000  # numbers of the small call
# The rotation of equal numbers has coordinates of 0, which is a boundary between two codes.
EQUAL = ("a row of the largest", "a row of the lowest", "equal numbers")
# These are exponents, or their products are.
EXPONENTS = {"q", "k", "q_rot", "key_cache", "key_norms", "key_tile_means", "tile_scores", "exact_keys", "new_keys"}
EXPONENTS |= {"sinks", "m_partials", "g", "gk", "gv", "beta", "A_log", "dt_bias", "a", "b", "qkv", "z", "conv_pool"}
TABLES = ("signs", "codebook", "boundaries", "l_partials")  # ends of names; their values are made by other ops
TABLES += ("scales", "biases")  # of packed weights: each multiplies a group's sum, in which terms cancel
FEW, MANY = 3, 20  # changes of a tensor in a run
# test_gates_and_norms_at_thresholds.py and test_exponents_at_their_ends.py have the values of the rules, whose
# states depend on all tokens before.
FLOATING = [
    op
    for op, entry in REGISTRY.items()
    if any(map(is_floating, entry.smallest().values())) and not {"K", "V"} <= fields_of(entry)
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("op", FLOATING)
def test_values(op: str) -> None:
    entry = REGISTRY[op]
    # Paths of a trellis for numbers at the limits are equally near.
    points = [x for x in plans(op) if not (op.startswith("aura_encode") and getattr(x, "trellis", False))]
    calls = [(point, entry.call(point)) for point in some(points, 4, "values", op)]
    count = FEW if size_of(calls[0][1]) > CHEAP or "trellis" in fields_of(entry) else MANY
    names = {name: None for _, call in calls for name in tensors_of(call) if is_floating(call[name])}
    for name in [name for name in names if not name.endswith(TABLES)]:
        having = [each for each in calls if is_floating(each[1].get(name))]
        changes = [x for x in changes_of(torch.float32, 1.0) if not (op.startswith("aura_encode") and x in EQUAL)]
        cases = [*itertools.product(having, changes)]
        for (point, call), what in some(cases, count, "values", op, name):
            assert_exact_with(entry, point, call, name, what)


def assert_exact_with(entry: OpEntry[Any], point: Any, call: Call, name: str, what: str) -> None:
    change = changes_of(call[name].dtype, largest(entry.name, name, call[name].dtype))[what]
    changed = call | {name: change(call[name])}
    exact = entry.exact_outputs(changed)
    allowed = entry.bound(point, changed, exact)
    for device in DEVICES:
        found = attempt(entry, point, changed, device)
        assert not isinstance(found, str), found
        assert_rows_are_exact(found, exact, dict(allowed), f"{entry.name} on {device}, {name}: {what}, at {point.name}")


def largest(op: str, name: str, dtype: torch.dtype) -> float:
    """Returns the largest number that an argument may have next to others of the usual size.

    float32 holds the squares of 2^60. The encoder takes any number. A difference of scores is an exponent, so that an
    error relative to large scores would be a large one of the result.
    """
    if name in EXPONENTS:
        return 2.0
    return torch.finfo(dtype).max if dtype == torch.float16 or op.startswith("aura_encode") else 2.0**60
