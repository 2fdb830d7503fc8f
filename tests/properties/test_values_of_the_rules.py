"""Tests the delta rules, their stages and gradients with extreme numbers, equal numbers and zeros, at each place.

test_values_at_the_limits_of_dtypes.py has the other ops, the changes and the comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import DEVICES
from tests.helpers.entries import algorithms_of, fields_of
from tests.helpers.variations import some
from tests.properties.test_values_at_the_limits_of_dtypes import assert_values, changes_of
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, is_floating, tensors_of
from torch_gdn_check.registry.models import DTYPES

RULES = [op for op, entry in REGISTRY.items() if {"K", "V"} <= fields_of(entry)]
PLANS, FEW = 1, 2  # of a run: points, and changes of each tensor of a point
K = 16
PROPORTIONAL = {"v", "u", "v_new", "h", "initial_state", "state_pool", "do", "dht"}  # results are, to these together
DECAYS = {"g", "gk", "gv"}


def plans(op: str) -> Iterator[Any]:
    """Yields points for each algorithm, with and without the norm, with log decays and with raw gates.

    Chunks, stages and the step of a layer round what they pass on to the dtype. Their 16-bit errors have no bound for
    each number, because large terms may cancel.
    """
    entry = REGISTRY[op]
    is_rule = "use_qk_l2norm_in_kernel" in entry.arguments
    passes_on = "chunk_size" in entry.arguments or not is_rule
    factors: dict[str, list[Any]] = {"dtype": [torch.float32] if passes_on else list(DTYPES)}
    if is_rule:
        factors["normalise"] = [False, True]
    if "use_gate_in_kernel" in entry.arguments:
        factors["gated"] = [False, True]
    if "return_intermediate_states" in entry.arguments:
        factors["algorithm"] = list(algorithms_of(op))
    for values in itertools.product(*factors.values()):
        changes = dict(zip(factors, values, strict=True))
        yield replace(entry.small, K=K, V=8, H=1, HV=2, tokens=20, batch=1, **changes)


def largest(op: str, name: str, call: Call) -> float:
    """Returns the largest number that an argument may have next to others of the usual size.

    Keys without a norm are at most unit vectors, because a state grows with their squares at each token. The reference
    of chunk_bwd_dqkwg derives by autograd: equal terms of a token's dg cancel, and leave 2^-52 of their size.
    """
    if name in PROPORTIONAL:
        return 2.0**10 if call[name].dtype == torch.float16 else 2.0**30 if op == "chunk_bwd_dqkwg" else 2.0**60
    if name in ("q", "k", "w"):
        has_norm = call.get("use_qk_l2norm_in_kernel")
        return (2.0**15 if call[name].dtype == torch.float16 else 2.0**60) if has_norm else K**-0.5
    return {"a": 1e3, "b": 1e3, "A_log": 4.0, "dt_bias": 4.0}.get(name, 1e4 if name in DECAYS else 2.0)


def valid(name: str, x: Tensor, call: Call) -> Tensor:
    """Returns numbers that the op takes: log decays are at most 0, betas at least 0, A is lower triangular."""
    if name in DECAYS and not (name == "g" and call.get("use_gate_in_kernel")):
        return -x.abs()
    if name == "beta" and not call.get("use_beta_sigmoid_in_kernel"):
        return x.abs()
    return x * (call[name] != 0) if name == "A" else x


def names_of(op: str, call: Call) -> list[str]:
    """Returns the tensors to change. The g of most stages is a sum of all decays before, which cannot rise."""
    is_sum = "chunk_fwd" in op or "_bwd_d" in op
    is_sum = is_sum or op in ("chunk_scaled_dot_kkt", "recompute_w_u", "prepare_wy_repr_bwd")
    return [name for name in tensors_of(call) if is_floating(call[name]) and not (is_sum and name == "g")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("op", RULES)
def test_values_of_the_rules(op: str) -> None:
    entry = REGISTRY[op]
    for point in some([*plans(op)], PLANS, "plans", op):
        call = entry.call(point)
        devices = DEVICES if point.dtype == torch.float32 else ("cpu",)
        for name in names_of(op, call):
            changes = changes_of(call[name].dtype, largest(op, name, call))
            for what in some([*changes], FEW, "values", op, name, point.name):
                changed = call | {name: valid(name, changes[what](call[name]), call)}
                assert_values(entry, point, changed, f"{name}: {what}", devices)
