"""Tests pages, queries and outputs with more than 2**31 elements, which need offsets of 64 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.errors import assert_same_bits
from tests.helpers.large import BEYOND, far_apart, needs_sparse_memory, sparse_memory

pytestmark = needs_sparse_memory


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors(keys: int, HQ: int) -> dict[str, Tensor]:
    """Makes two blocks. A sequence of two queries begins with the last one."""
    names = {"q": (2, HQ, 32), "key_cache": (2, keys, 2, 32), "value_cache": (2, keys, 2, 32), "out": (2, HQ, 32)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()}


@pytest.mark.parametrize(("keys", "HQ"), [(40, 4), (40, 24), (150, 4)], ids=["decode", "prefill", "divided"])
def test_attention(keys: int, HQ: int) -> None:
    tables = (int32(1, 0)[None], int32(0, 2), int32(2 * keys))
    with sparse_memory() as device:
        near = {name: x.to(device) for name, x in tensors(keys, HQ).items()}
        table, boundaries, length = (x.to(device) for x in tables)
        indices = {"block_table": table, "cu_seqlens": boundaries, "seq_lens": length}
        expected = torch_gdn.paged_attention(**near, **indices).cpu()
        for name, x in near.items():
            far = far_apart(x)
            assert far.stride(0) >= BEYOND
            assert_same_bits(name, torch_gdn.paged_attention(**(near | {name: far}), **indices), expected)
            del far
            torch.mps.synchronize()
            torch.mps.empty_cache()
    assert expected.isfinite().all() and expected.abs().max() > 0


@pytest.mark.parametrize("which", ["key", "value", "key_cache", "value_cache"])
def test_storing(which: str) -> None:
    x, cache = torch.randn(2, 2, 32).to(torch.bfloat16), torch.zeros(2, 8, 2, 32, dtype=torch.bfloat16)
    with sparse_memory() as device:
        arguments = {"key": x, "value": x.flip(0), "key_cache": cache, "value_cache": cache}
        near = {name: tensor.to(device, copy=True) for name, tensor in arguments.items()}
        far = near | {which: far_apart(near[which])}
        torch_gdn.reshape_and_cache(**far, slot_mapping=int32(11, 2).to(device))
        for name, new in (("key_cache", x), ("value_cache", x.flip(0))):
            stored = far[name].cpu()
            assert torch.equal(stored[1, 3], new[0]) and torch.equal(stored[0, 2], new[1])
            assert (stored != 0).sum() == (new != 0).sum()
