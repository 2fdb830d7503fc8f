"""Tests ops with sinks and scores far apart, values at the ends of each dtype's exponents, NaN, and no tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.entries import algorithms_of, assert_exact, fields_of
from torch_gdn_check.registry import REGISTRY, Point
from torch_gdn_check.registry.inputs import Call, tensors_of, to_device
from torch_gdn_check.registry.layers import RowPoint
from torch_gdn_check.registry.models import DTYPES
from torch_gdn_check.registry.registry import Named

OF_A_HUNDRED = 100 * 2**-24  # the relative error of exp(x), where x is a float32 near 100
WITH_SINKS = [op for op, entry in REGISTRY.items() if "sinks" in entry.arguments]


@pytest.mark.parametrize("size", [1.0, 30.0], ids=["scores", "scores that are far apart"])
@pytest.mark.parametrize("op", WITH_SINKS)
def test_sinks_far_above_and_below_the_scores(device: torch.device, op: str, size: float) -> None:
    """Exponentials of the differences overflow or vanish. Heads whose sink outweighs every key are nearly zero."""
    entry = REGISTRY[op]
    point = replace(entry.small, plain=False) if "plain" in fields_of(entry) else entry.small  # plain tables are zeros
    call = entry.call(point)
    if "q" in call:
        call["q"] = call["q"] * size
    heads = point.HQ if "plain" in fields_of(entry) else len(call["sinks"])
    for sinks in ([-100.0, 30.0, -torch.inf, 0.0], [80.0, -1e4, 20.0, -100.0]):
        call["sinks"] = torch.tensor(sinks).repeat(heads)[:heads]
        assert_exact(entry, point, call, device, OF_A_HUNDRED)


# An op's outputs are proportional to these arguments together.
PROPORTIONAL = {"v", "u", "v_new", "h", "initial_state", "state_pool", "value_cache", "value", "up"}
SCALED = [op for op, entry in REGISTRY.items() if PROPORTIONAL & set(entry.arguments) and "W" not in fields_of(entry)]
SCALED.remove("prepare_wy_repr_bwd")  # its outputs are proportional to dw and du


def factors(dtype: torch.dtype, largest: float) -> tuple[float, float]:
    """Returns powers of two that scale values to the ends of a dtype's exponents without loss.

    A GPU may flush the smallest numbers of float32 and bfloat16 to zero, but not those of float16.
    """
    if dtype == torch.float32:
        return 2.0**80, 2.0**-80
    up = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest) - 3)  # intermediate sums may be larger
    return up, 2.0**-80 if dtype == torch.bfloat16 else 2.0 ** math.floor(-14 - math.log2(largest))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", SCALED)
def test_values_at_the_ends_of_the_exponents(device: torch.device, op: str, dtype: torch.dtype) -> None:
    """A large or small power of two changes only the exponents of each output that is proportional. Some values are
    zero.
    """
    entry = REGISTRY[op]
    points = [entry.small]
    if "queries" in fields_of(entry):  # few queries and many, with vector loads
        points = [replace(entry.small, plain=False, D=128, queries=queries) for queries in ((1, 0, 1), (9, 0, 1))]
    for point in points:
        point = replace(point, dtype=dtype, **({"cache": dtype} if "cache" in fields_of(entry) else {}))
        call = entry.call(point)
        names = [name for name in PROPORTIONAL & call.keys() if call[name].is_floating_point()]
        if "v" in names:
            call["v"] = call["v"].index_fill(1, torch.tensor([0]), 0.0)  # one token has zeros
        if "out" in call:
            call["out"] = torch.zeros_like(call["out"])  # rows of padding must not differ by chance

        def outputs(factor: float, call: Call = call, names: list[str] = names, point: Point = point) -> Named:
            on_device = to_device(call | {name: call[name] * factor for name in names}, device)
            return {name: x.cpu() for name, x in entry.outputs(on_device, entry.run(on_device, point)).items()}

        result = outputs(1.0)
        largest = max(x.float().nan_to_num().abs().max().item() for x in (*result.values(), *(call[n] for n in names)))
        up, down = factors(dtype, largest)
        runs = {factor: outputs(factor) for factor in (up, down)}
        changed = [name for name, x in runs[up].items() if not torch.equal(x, result[name])]
        for factor, name in itertools.product((up, down), changed):
            x, expected = runs[factor][name].double(), result[name].double() * factor
            smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # v is rounded to it
            terms = 64 if op.endswith("_bwd") else 4  # a gradient of k sums over the columns of v
            assert ((x - expected).abs() <= terms * smallest * max(factor, 1.0)).all(), name
        assert changed or not names


WITH_TOKENS = {op for op, entry in REGISTRY.items() if "tokens" in fields_of(entry)} - {"qk_norm_rope_and_cache_"}


@pytest.mark.parametrize("op", sorted(WITH_TOKENS))
def test_no_tokens(device: torch.device, op: str) -> None:
    """Results are empty. A state stays as it is, or starts from zeros for a new request."""
    entry = REGISTRY[op]
    has_algorithms = "return_intermediate_states" in entry.arguments
    for algorithm in algorithms_of(op) if has_algorithms else (None,):
        each = replace(entry.small, tokens=0, **({"algorithm": algorithm} if has_algorithms else {}))
        call = entry.call(each)
        exact, on_device = entry.exact_outputs(call), to_device(call, device)
        result = entry.outputs(on_device, entry.run(on_device, each))
        assert {name: x.shape for name, x in result.items()} == {name: x.shape for name, x in exact.items()}
        for name, x in result.items():
            assert torch.equal(x.cpu().to(exact[name].dtype), exact[name]), name


@pytest.mark.parametrize("op", [op for op, entry in REGISTRY.items() if isinstance(entry.small, RowPoint)])
def test_nan_is_where_float64_has_it(device: torch.device, op: str) -> None:
    """Other numbers keep their bits."""
    entry = REGISTRY[op]
    call = entry.smallest()

    def outputs(call: Call) -> Named:
        on_device = to_device(call, device)
        return {name: x.cpu() for name, x in entry.outputs(on_device, entry.run(on_device)).items()}

    before = outputs(call)
    for name in [name for name in tensors_of(call) if call[name].is_floating_point() and call[name].dim() > 2]:
        spoilt = call | {name: call[name].clone()}
        spoilt[name][tuple(size // 2 for size in spoilt[name].shape)] = torch.nan
        where = {name: x.isnan() for name, x in entry.exact_outputs(spoilt).items()}
        assert any(x.any() for x in where.values())
        for each, x in outputs(spoilt).items():
            assert torch.equal(x.isnan(), where[each]), f"{each} after NaN in {name}"
            assert torch.equal(x[~where[each]], before[each][~where[each]]), f"{each} after NaN in {name}"
