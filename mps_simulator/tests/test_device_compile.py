"""torch.compile and fake tensors on the simulated mps device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

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
def test_compile_inductor_with_extern_kernels() -> None:
    import torch._inductor.config

    x = torch.randn(4, 8, device=MPS)
    with torch._inductor.config.patch(fallback_by_default=True):
        torch.testing.assert_close(torch.compile(activation, fullgraph=True)(x).cpu(), activation(x).cpu())


@pytest.mark.usefixtures("reset_dynamo")
def test_fake_tensors_on_mps() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    pending = torch.ones(3, device=MPS).clone()
    with FakeTensorMode():
        query = torch.empty(1, 2, 3, 8, device=MPS)
        assert F.scaled_dot_product_attention(query, query, query).device == torch.device("mps:0")
        torch.mps.synchronize()  # runs the copy, which the mode must not see
    assert pending.tolist() == [1, 1, 1]
