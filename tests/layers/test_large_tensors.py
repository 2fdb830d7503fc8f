"""Tests the ops around the rule with inputs, outputs and pools of states of more than 2**31 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_same_bits
from tests.helpers.large import far_apart, last_row, needs_sparse_memory, repeated, rows_beyond, sparse_memory
from torch_gdn import causal_conv1d, l2norm, rms_norm_gated

pytestmark = needs_sparse_memory
D, W = 256, 4


def check(name: str, got: Tensor, expected: Tensor) -> None:
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert_same_bits(name, got, expected)


def bf16(*size: int) -> Tensor:
    return torch.randn(size).to(torch.bfloat16)


@pytest.mark.parametrize("kernel", ["causal_conv1d", "causal_conv1d_channel_first"])
def test_causal_conv1d(kernel: str) -> None:
    x, weight = bf16(2, 70, D), bf16(D, W)
    if kernel == "causal_conv1d_channel_first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    with sparse_memory() as device, kernels_run(device, kernel):
        filters = weight.to(device)
        expected = causal_conv1d(x.to(device), filters)[0].cpu()
        check("y of inputs far apart", causal_conv1d(far_apart(x), filters)[0], expected)
        torch.mps.empty_cache()
        many = repeated(x[1:], rows_beyond(x[1].numel()))
        check("the last y of many", last_row(causal_conv1d, len(many), many, filters), expected[1:])


def test_a_state_far_into_the_pool_of_causal_conv1d_update() -> None:
    x, weight, states = bf16(2, 3, D), bf16(D, W), bf16(2, D, W)
    slots = 2**31 // (D * W) + 3

    def run(pool: Tensor, indices: list[int]) -> tuple[Tensor, Tensor]:
        pool[indices] = states.to(pool.device)
        on_device = torch.tensor(indices, device=pool.device)
        y = torch.ops.gdn.causal_conv1d_update_(x.to(pool.device), weight.to(pool.device), pool, on_device)
        return y.cpu(), torch.stack([pool[i].cpu() for i in indices])

    with sparse_memory() as device, kernels_run(device, "causal_conv1d_update"):
        near = run(torch.zeros(3, D, W, dtype=x.dtype, device=device), [2, 0])
        far = run(torch.empty(slots, D, W, dtype=x.dtype, device=device), [slots - 1, 0])
    for name, got, expected in zip(("y", "the slots"), far, near, strict=True):
        check(name, got, expected)


@pytest.mark.parametrize("op", [l2norm, rms_norm_gated], ids=["l2norm", "rms_norm_gated"])
def test_norms(op: Any) -> None:
    x, gate = bf16(2, 64, 4, D), bf16(2, 64, 4, D)
    more = (torch.randn(D),) if op is rms_norm_gated else ()
    with sparse_memory() as device, kernels_run(device, op.__name__):
        rest = tuple(y.to(device) for y in more)

        def arguments(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
            return (change(x), change(gate), *rest) if rest else (change(x),)

        expected = op(*arguments(lambda y: y.to(device))).cpu()
        check("y of inputs far apart", op(*arguments(far_apart)), expected)
        torch.mps.empty_cache()
        rows = rows_beyond(x[1].numel())
        y = last_row(op, rows, *arguments(lambda y: repeated(y[1:], rows)))
        check("the last y of many", y, expected[1:])
