"""Varies the calls of a registry entry: its kernels, layouts, values. The properties in tests/properties use it."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.helpers.devices import DEVICES, ready
from tests.helpers.entries import algorithms_of
from tests.sweeps import seed_of_run
from torch_gdn._recorder import KernelVariant, recording
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import REGISTRY, Point, bounds
from torch_gdn_check.registry.inputs import Call, empty_on, to_device
from torch_gdn_check.registry.registry import Named, OpEntry, launches_at

T = TypeVar("T")
# Points of the registry are computed with at most so much of each thing, so that a property has time for many calls.
MOST = {"tokens": 40, "keys": 132, "T": 70, "M": 40, "queries": 20, "heads": 8, "HV": 8, "batch": 9}
MOST |= {"D": 128, "I": 128, "IS": 128, "N": 70}
POINTS = 6  # of an op with many, for which plans() looks for kernels
LEAST_OF_A_HEAD = 256  # numbers; one of fewer that is rounded the other way shows in the error of all


def shrunk(point: Any) -> Any:
    """Returns the point with at most as much of each thing as MOST says. Sequences have blocks of their own."""

    def least(value: Any, most: int) -> Any:
        return tuple(min(each, most) for each in value) if isinstance(value, tuple) else min(value, most)

    names = [each.name for each in fields(point)]
    point = replace(point, **({"plain": False} if "plain" in names else {}))
    return replace(point, **{name: least(getattr(point, name), MOST[name]) for name in names if name in MOST})


@functools.cache
def plans(op: str) -> tuple[Any, ...]:
    """Returns a point for each list of kernels that the op launches at the registry's points, the small one first.

    A rule has a point for each algorithm, in float32 and in a dtype of 16 bits. Kernels with sizes of heads as template
    arguments count once by name, and a run looks at some points of their ops.
    """
    entry, known = REGISTRY[op], dict[Any, Any]()
    ready("mps")
    names = {each.name for each in fields(entry.small)}
    if {"K", "V"} <= names:
        algorithms = algorithms_of(op) if "return_intermediate_states" in entry.arguments else (None,)
        narrow = some((torch.bfloat16, torch.float16), 1, "dtype", op)
        return tuple(replace(entry.small, dtype=x, algorithm=a) for x in (torch.float32, *narrow) for a in algorithms)
    points = [*dict.fromkeys(map(shrunk, (entry.small, *entry.quick, *entry.points)))]
    if "trellis" in names:
        points[1:] = random_of("plans", op).sample(points[1:], min(POINTS, len(points) - 1))
    for point in points:
        variants = [launch.variant for launch in launches_at(entry, point, fake_mps())]
        numbers = () if "trellis" in names else tuple(x for each in variants for x in each.arguments if x.isdecimal())
        known.setdefault((tuple(each.kernel for each in variants), numbers), point)
    return tuple(known.values())


def variants_of(entry: OpEntry[Any], point: Point, call: Call) -> set[KernelVariant]:
    with fake_mps(), recording() as recorded:
        entry.run(empty_on(call, "mps"), point)
    return {*recorded.variants}


def random_of(*words: object) -> random.Random:
    """Returns a generator that depends on these words and on the run's seed."""
    return random.Random(" ".join(map(str, (seed_of_run(), *words))))


def some(cases: Sequence[T], count: int, *words: object) -> list[T]:
    """Returns so many of the cases, by these words and the run's seed. A run of every case takes all."""
    every = seed_of_run() == "all" or len(cases) <= count
    return list(cases) if every else random_of(*words).sample(cases, count)


def size_of(call: Call) -> int:
    return sum(x.numel() for x in call.values() if isinstance(x, Tensor))


def attempt(entry: OpEntry[Any], point: Point, call: Call, device: str) -> Named | str:
    """Returns what the op computes and writes, or the argument that it refuses or that its kernels report."""
    on_device = to_device(call, ready(device))
    try:
        result = entry.outputs(on_device, entry.run(on_device, point))
        if device == "mps":
            torch.mps.synchronize()
    except (ValueError, TypeError, RuntimeError) as error:
        refused = re.match(rf"(?:gdn::)?{entry.name}: (\w+): expected .*, got ", str(error), re.DOTALL)
        if refused is None:
            raise
        return refused[1]
    return {name: x.cpu() for name, x in result.items()}


def assert_exact_everywhere(
    entry: OpEntry[Any],
    point: Any,
    call: Call,
    what: str = "",
    exact: Named | None = None,
    devices: Sequence[str] = DEVICES,
) -> bool:
    """Asserts that each device's outputs are within the op's bounds of float64, or that all devices refuse the same
    argument. Returns whether they compute.

    Sums are allowed the usual error of as many terms as the longest row has.
    """
    result = {device: attempt(entry, point, call, device) for device in devices}
    refused = {device: x if isinstance(x, str) else "" for device, x in result.items()}
    assert len(set(refused.values())) == 1, f"{entry.name}, {what}, at {point.name}: refused: {refused}"
    if any(refused.values()):
        return False
    exact = entry.exact_outputs(call) if exact is None else exact
    longest = max((x.shape[-1] for x in call.values() if isinstance(x, Tensor) and x.dim() > 1), default=1)
    more = 2**-23 * math.sqrt(longest)
    # By definition it rounds the norm, its product with the weight, and that with the gate. Half a place of a factor is
    # up to two of the product.
    roundings, halves = (3, 5) if call.get("round_norm") else (1, 1)
    for device, results in result.items():
        assert not isinstance(results, str)
        parts = entry.compared(point, call, results, exact)
        parts = [each for each in parts if each.part == "the whole" or is_long(entry, each.tensor, results)]
        worst = bounds.worst(
            replace(each, bound=roundings * each.bound + more if each.bound else 0.0) for each in parts
        )
        assert worst.kept, f"{entry.name} on {device}, {what}, at {point.name}: {worst}"
        for name in results.keys() - entry.bound(point, call, exact).keys():
            share = twice_rounded(results[name], exact[name], halves)
            assert share <= 0.02, f"{entry.name} on {device}, {what}, at {point.name}: {name}: {share} rounded twice"
    return True


def twice_rounded(x: Tensor, exact: Tensor, halves: int = 1) -> float:
    """Returns the share of 16-bit numbers that are further from float64 than so many halves of a place."""
    if x.dtype not in (torch.float16, torch.bfloat16) or not x.numel():
        return 0.0
    wide = exact.double()
    half_a_place = torch.ldexp(torch.ones_like(wide), wide.abs().frexp().exponent - 1) * torch.finfo(x.dtype).eps / 2
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    allowed = halves * half_a_place.clamp(min=least) + 1e-5 * wide.abs().max()
    return ((x.double() - wide).abs() > allowed).double().mean().item()


def is_long(entry: OpEntry[Any], name: str, results: Named) -> bool:
    """Returns whether a head of this output has so many numbers that an error relative to them means something."""
    x = results[name]
    dim = entry.heads.get(name, 2 if x.dim() > 2 else None)
    return dim is not None and x.numel() // max(x.shape[dim], 1) >= LEAST_OF_A_HEAD
