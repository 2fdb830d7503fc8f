"""Tests torch.compile and fake tensors on the simulated mps device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import mps_simulator

MPS = "mps"


@pytest.fixture
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def activation(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x * 3) + x.sum(-1, keepdim=True)


@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_aot_eager(dynamic: bool) -> None:
    x = torch.randn(4, 8, device=MPS)
    compiled = torch.compile(activation, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x).cpu(), activation(x).cpu())


@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_compiles_to_metal(dtype: torch.dtype) -> None:
    x = torch.randn(4, 70, device=MPS, dtype=dtype)
    with mps_simulator.settings(all_lanes=False), mps_simulator.profile() as profile:
        result = torch.compile(activation, fullgraph=True)(x)
    assert profile.launched("generated_kernel_0") == 1
    exact = activation(x.cpu().double())
    one_rounding = torch.finfo(dtype).eps * exact.abs().max().item()  # the sum is rounded, and may cancel in the result
    torch.testing.assert_close(result.cpu().double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=one_rounding)


@pytest.mark.usefixtures("reset_dynamo")
def test_fake_tensors_on_mps() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    pending = torch.ones(3, device=MPS).clone()
    with FakeTensorMode():
        query = torch.empty(1, 2, 3, 8, device=MPS)
        assert F.scaled_dot_product_attention(query, query, query).device == torch.device("mps:0")
        torch.mps.synchronize()  # runs the copy, which the mode must not see
    assert pending.tolist() == [1, 1, 1]
