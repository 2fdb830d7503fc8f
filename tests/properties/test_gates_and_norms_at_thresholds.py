"""Tests every op with numbers at its thresholds: gates, norms of rows near eps, windows that just fit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.entries import algorithms_of, assert_exact, fields_of
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import DTYPES
from torch_gdn_check.registry.registry import OpEntry

pytestmark = pytest.mark.sweep(4)

LEAST = 2.0**-123  # 8 times float32's smallest normal number; kernels may flush smaller numbers to zero
# exp is a series below 0.34; softplus(x) is x from 17 or 20 on; exp overflows at 88, and is denormal from -87 on and 0
# from -104 on.
OF_GATES = torch.tensor([0.0, 0.34, 17.0, 20.0, 87.0, 88.0, 104.0])


def around(values: Tensor) -> Tensor:
    """Returns the values and the next numbers on each side, with both signs."""
    far = torch.tensor(torch.inf)
    sides = torch.cat([values, values.nextafter(far), values.nextafter(-far)])
    return torch.cat([sides, -sides])


def assert_near(name: str, x: Tensor, exact: Tensor, least: Tensor | float = LEAST, more: float = 0.0) -> None:
    """Asserts that each number is within rounding of the exact one, relative to the largest of its row."""
    allowed = torch.finfo(x.dtype).eps / 2 + 1e-6 + more
    if x.dtype == torch.float16:
        least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    error = (x.cpu().double() - exact).abs().amax(-1)
    assert (error <= allowed * exact.abs().amax(-1) + least).all(), f"{name}: {error.max()}"


RULES = [op for op, entry in REGISTRY.items() if "use_gate_in_kernel" in entry.arguments]
# These compute gates and nothing else.
GATES = [op for op, entry in REGISTRY.items() if "A_log" in entry.arguments and not {"v", "qkv"} & {*entry.arguments}]


@pytest.mark.parametrize("op", GATES)
def test_gates(device: torch.device, op: str) -> None:
    """Each number is compared by itself. In each head A_log is at another end of its range."""
    entry, values = REGISTRY[op], around(OF_GATES)
    point = replace(entry.small, tokens=len(values), heads=4, batch=1, D=1)
    call = entry.call(point)
    call |= {"A_log": torch.tensor([-87.0, 0.0, 0.34, 80.0]), "dt_bias": torch.zeros_like(call["dt_bias"])}
    for name in {"a", "b", "g"} & call.keys():
        call[name] = values.view(-1, 1).expand(-1, 4).reshape(call[name].shape).contiguous()
    for options in ({}, {"lower_bound": -5.0}) if "lower_bound" in entry.arguments else ({},):
        on_device = to_device(call | options, device)
        exact = entry.exact_outputs(call | options)
        for name, x in entry.outputs(on_device, entry.run(on_device)).items():
            least = LEAST * call["A_log"].double().exp().clamp(min=1)  # exp(A_log) scales the smallest softplus
            more = 2 * 104 * 2**-24 if options else 0.0  # the error of exp(x) with a rounded x down to -104
            assert_near(name, x.reshape(-1, 4, 1), exact[name].reshape(-1, 4, 1), least, more)


@pytest.mark.parametrize("op", RULES)
def test_gates_of_the_rules(device: torch.device, op: str) -> None:
    """Log decays or raw gates are at the thresholds, and the states between them are compared."""
    entry, values = REGISTRY[op], torch.cat([OF_GATES, -OF_GATES])
    values = torch.stack([values, torch.full_like(values, -0.1)], 1).flatten()
    small = replace(entry.small, K=16, V=8, H=1, HV=2, tokens=len(values), batch=1)
    for algorithm in algorithms_of(op) if "chunk" in op else (None,):
        for raw in (False, True):
            point = replace(small, gated=raw, algorithm=algorithm)
            call = entry.call(point)
            shape = call["g"].shape
            g = values if raw else -values.abs()
            call["g"] = g.view(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()
            assert_exact(entry, point, call, device)


EPS = 1e-6  # norms take these


def rows_at_the_ends(D: int, dtype: torch.dtype) -> Tensor:
    """Returns rows that are zero, whose squares add up to EPS, and that have the smallest or the largest numbers."""
    info = torch.finfo(dtype)
    largest = info.max if dtype == torch.float16 else 2.0**60  # float32 still holds their squares
    rows = torch.zeros(6, D, dtype=torch.float64)
    rows[1, -1], rows[2] = math.sqrt(EPS), math.sqrt(EPS / D)
    rows[3] = info.smallest_normal * info.eps
    rows[4, 0], rows[5] = largest, largest / math.sqrt(D)
    return rows.to(dtype)


NORMS = [op for op, entry in REGISTRY.items() if "eps" in entry.arguments]


@pytest.mark.parametrize("op", NORMS)
def test_rows_around_eps(device: torch.device, op: str) -> None:
    """Rows have the usual length, and the shortest that an op takes."""
    entry = REGISTRY[op]
    shortest = {"D": 2, "P": 1} if "P" in fields_of(entry) else {"D": 1}
    for dtype, sizes in itertools.product(DTYPES, ({}, shortest)):
        call = entry.call(replace(entry.small, dtype=dtype, **sizes))
        for name in {"x", "q", "k"} & call.keys():
            x = call[name]
            call[name] = (
                rows_at_the_ends(x.shape[-1], dtype).repeat(x[..., 0].numel(), 1)[: x[..., 0].numel()].view_as(x)
            )
        if "residual" in call:
            call["residual"] = torch.zeros_like(call["residual"])
        on_device = to_device(call, device)
        exact = entry.exact_outputs(call)
        for name, x in entry.outputs(on_device, entry.run(on_device)).items():
            rows = (*exact[name].shape, 1) if name == "rstd" else exact[name].shape  # a row has one factor
            assert_near(name, x.view(rows), exact[name].view(rows))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("op", [op for op in NORMS if "activation" in REGISTRY[op].arguments])
def test_gates_of_norms(device: torch.device, op: str, activation: str) -> None:
    """Each row has one gate, so that a small gradient of a wide open gate is compared with numbers of its size."""
    entry, values = REGISTRY[op], around(OF_GATES)
    call = entry.call(replace(entry.small, tokens=len(values), heads=1, batch=1)) | {"activation": activation}
    call["g"] = values.view(1, -1, 1, 1).expand_as(call["g"]).contiguous()
    on_device, exact = to_device(call, device), entry.exact_outputs(call)
    for name, x in entry.outputs(on_device, entry.run(on_device)).items():
        assert_near(name, x, exact[name], 104 * LEAST)  # silu multiplies the smallest sigmoid by the gate


@pytest.mark.parametrize("op", [op for op in NORMS if "x" in REGISTRY[op].arguments])
def test_without_eps_a_row_of_zeros_is_nan(device: torch.device, op: str) -> None:
    """The row is NaN as in PyTorch, and other rows keep their bits."""
    entry = REGISTRY[op]
    call = to_device(entry.smallest() | {"eps": 0.0}, device)
    expected, first = next(iter(entry.outputs(call, entry.run(call)).values())), (0,) * (call["x"].dim() - 1)
    for name in {"x", "residual"} & call.keys():
        call[name][first] = 0
    y = next(iter(entry.outputs(call, entry.run(call)).values()))
    assert y[first].isnan().all()
    y[first] = expected[first]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("op", RULES)
def test_keys_around_eps(device: torch.device, op: str) -> None:
    """The rules normalise q and k in the kernel. Every second token is at an end, and the others lie between."""
    entry = REGISTRY[op]
    for algorithm in algorithms_of(op) if "chunk" in op else (None,):
        point = replace(entry.small, K=16, V=8, H=1, HV=1, tokens=12, batch=1, normalise=True, algorithm=algorithm)
        call = entry.call(point)
        for name in ("q", "k"):
            call[name] = call[name].clone()
            call[name][0, ::2, 0] = rows_at_the_ends(16, torch.float32)
        assert_exact(entry, point, call, device)


# aura_attention runs aura_flash_p1, whose maxima are infinite if no key of a block is visible.
WINDOWED = [op for op, entry in REGISTRY.items() if {"window", "sinks"} <= set(entry.arguments)]


def windows_of(entry: OpEntry[Any]) -> tuple[Any, list[int]]:
    """Returns a point, and windows around its blocks and its numbers of keys."""
    if "HQ" in fields_of(entry):
        point = replace(entry.small, plain=False, queries=(1, 9, 3), keys=(16, 24, 33))
        return point, [1, 8, 9, 16, 33, 34]
    return replace(entry.small, keys=32, queries=3), [1, 16, 17, 32, 33]


@pytest.mark.parametrize("op", WINDOWED)
def test_windows_of_as_many_keys_as_there_are(device: torch.device, op: str) -> None:
    entry = REGISTRY[op]
    point, windows = windows_of(entry)
    for window in windows:
        assert_exact(entry, point, entry.call(point) | {"window": window}, device)
