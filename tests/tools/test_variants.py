"""Tests that a launch gets the pipeline of its kernel and of all its template arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_gdn
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn import _C, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZE = 52  # no other test has rows of this size


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
def test_arguments_in_another_order_are_another_variant() -> None:
    """rms_norm_gated is called twice with three dtypes in all 6 orders, and finds each variant the second time."""
    device = ready("mps")
    names = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
    x = torch.randn(3, SIZE)
    for dtypes in [*itertools.permutations(DTYPES)] * 2:
        row, gate, weight = (part.to(device, dtype) for part, dtype in zip((x, x, x[0]), dtypes, strict=True))
        with profiled() as profile:
            torch_gdn.rms_norm_gated(row, gate, weight)
        assert list(profile.kernels) == ["_".join(["rms_norm_gated", *(names[each] for each in dtypes), f"{SIZE}_4"])]


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
def test_kernels_of_the_same_arguments_are_two_variants() -> None:
    device = ready("mps")
    x, weight = torch.randn(1, 40, 128).to(device), torch.randn(128, 3).to(device)
    with profiled() as profile:
        torch.ops.gdn.causal_conv1d_update_(x[:, :1], weight, torch.zeros(1, 128, 2, device=device))
        torch.ops.gdn.causal_conv1d(x.mT.contiguous().mT, weight)
    arguments = "float_float_float_3"
    assert {*profile.kernels} == {f"causal_conv1d_{which}_{arguments}" for which in ("update", "channel_first")}


def test_a_variant_is_compiled_once_by_a_call_and_by_name() -> None:
    device = ready("mps")
    x = torch.randn(3, SIZE)
    before = _C.compile("l2norm", "layers/l2norm.metal", ["float", f"{SIZE}"])
    y = torch_gdn.l2norm(x.to(device)).cpu()
    torch.testing.assert_close(y.double(), reference.l2norm(x.double()), rtol=1e-6, atol=1e-7)
    (after,) = [facts for facts in _C.pipelines() if facts["name"] == f"l2norm_float_{SIZE}"]
    assert after == before
