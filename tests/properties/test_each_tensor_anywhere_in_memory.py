"""Tests every op with one tensor at a time elsewhere in memory: rows apart, an offset, no alignment, expanded."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.entries import fields_of
from tests.helpers.variations import assert_exact_everywhere, plans, some
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import tensors_of

Layout = Callable[[Tensor], Tensor]


def filled(x: Tensor, size: int) -> Tensor:
    """Returns memory of which nothing may be read."""
    return x.new_full((size,), torch.nan if x.is_floating_point() else 0x55, dtype=x.dtype)


def rows_apart(x: Tensor, gap: int, offset: int) -> Tensor:
    """Returns the same values, with `gap` elements between the rows and `offset` elements before the first."""
    if x.dim() == 0:
        return filled(x, offset + 1).index_fill(0, torch.tensor([offset]), x.item())[offset]
    row = x.shape[-1] + gap
    whole = filled(x, offset + row * max(x.numel() // max(x.shape[-1], 1), 1))
    view = whole[offset:].view(*x.shape[:-1], row)[..., : x.shape[-1]]
    return view.copy_(x)


def reordered(x: Tensor) -> Tensor:
    """Returns the same values, with the first two dimensions swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else x


def expanded(x: Tensor, dim: int) -> Tensor:
    """Returns the first of a dimension in all places of it. Numbers that were not to be read now are.

    Integers stay, because other indices may find numbers that are not to be read.
    """
    return x.narrow(dim, 0, 1).nan_to_num(0.5).expand_as(x) if x.dim() > 1 and x.is_floating_point() else x


# A vector has at most 16 bytes, and at most 8 elements. Layouts that keep its alignment run the same kernel.
LAYOUTS: dict[str, Layout] = {
    "rows apart, aligned": lambda x: rows_apart(x, 16, 16),
    "rows apart, not aligned": lambda x: rows_apart(x, 1, 0),
    "an odd offset": lambda x: rows_apart(x, 0, 1),
    "an even offset and rows": lambda x: rows_apart(x, 2, 2),
    "dimensions swapped": reordered,
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    "expanded": lambda x: expanded(x, 0),
    "expanded within": lambda x: expanded(x, -2),
}
NEW_VALUES = {"expanded", "expanded within"}
ALWAYS = ("rows apart, aligned", "an odd offset", "columns apart")  # in each run; the other layouts take turns
MOST = 2  # plans that have one tensor with a layout of these
OPS = [op for op in REGISTRY if op not in ("batch_copy_",)]  # its pool is bytes in one row


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", OPS)
def test_each_tensor(op: str) -> None:
    """Each tensor has each layout, while the others are as drawn. Both devices take it or refuse this argument."""
    entry, taken = REGISTRY[op], 0
    is_slow = bool({"trellis", "K"} & fields_of(entry))  # AURA's tensors take long to draw, and rules to compute
    drawn = [(point, entry.call(point)) for point in (some(plans(op), 3, op) if is_slow else plans(op))]
    exact_of = functools.cache(lambda i: entry.exact_outputs(drawn[i][1]))
    for name in {name: None for _, call in drawn for name in tensors_of(call)}:
        having = [i for i, (_, call) in enumerate(drawn) if name in tensors_of(call)]
        ties = NEW_VALUES if name == "codebook" else set[str]()  # equal rows of a codebook are equally near
        for layout in {*ALWAYS, *some(sorted(LAYOUTS.keys() - ties), 1, op, name)}:
            for i in some(having, MOST if layout in ALWAYS and not is_slow else 1, op, name, layout):
                point, call = drawn[i]
                changed = LAYOUTS[layout](call[name])
                if changed is not call[name]:
                    known = None if layout in NEW_VALUES else exact_of(i)
                    taken += assert_exact_everywhere(entry, point, call | {name: changed}, f"{name}: {layout}", known)
    assert taken
