"""Tests attention with more than 2**31 elements in the queries. No buffer holds that many 32-bit codes and norms."""

from __future__ import annotations

import torch

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_same_bits
from tests.helpers.large import far_apart, needs_sparse_memory, sparse_memory
from torch_gdn_check.registry.aura import Codec, make_cache
from torch_gdn_check.registry.inputs import to_device


@needs_sparse_memory
def test_queries_far_apart() -> None:
    call = make_cache(Codec(64, 3), Codec(64, 4, 4), B=2, HK=2, T=40).parts(True)
    q = torch.randn(2, 4, 3, 64).to(torch.bfloat16)
    with sparse_memory() as device, kernels_run(device, "aura_rotate", "aura_flash_p1", "aura_flash_p2"):
        cache = to_device(call, device)
        expected = torch_gdn.aura_attention(q=q.to(device), **cache).cpu()
        o = torch_gdn.aura_attention(q=far_apart(q), **cache).cpu()
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert_same_bits("o", o, expected)
