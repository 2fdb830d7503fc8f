from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry.bounds import ROUNDING


def gate(device: torch.device, *tensors: Tensor, allow_neg_eigval: bool = False) -> tuple[Tensor, Tensor]:
    on_device = [each.to(device) for each in tensors]
    g, beta = launched(device, "gdn_gating", torch_gdn.gdn_gating, *on_device, allow_neg_eigval=allow_neg_eigval)
    return g.cpu(), beta.cpu()


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns A_log, a, b and dt_bias as models have them, with A from 0.01 to 16."""
    HV = shape[-1]
    A_log, dt_bias = torch.empty(HV).uniform_(0.01, 16).log(), torch.ones(HV)
    a, b = 4 * torch.randn(shape), 4 * torch.randn(shape)
    return A_log.to(dtype), a.to(dtype), b.to(dtype), dt_bias.to(dtype)


def check(device: torch.device, *tensors: Tensor, allow_neg_eigval: bool = False) -> None:
    g, beta = gate(device, *tensors, allow_neg_eigval=allow_neg_eigval)
    exact = reference.gdn_gating(*(each.double() for each in tensors), allow_neg_eigval=allow_neg_eigval)
    for name, x, expected in zip(("g", "beta"), (g, beta), exact, strict=True):
        assert x.dtype == torch.float32 and x.is_contiguous()
        assert_close(name, x, expected, 3e-7, head_dim=x.dim() - 1)
        assert ((x - expected).abs() <= 6e-7 * expected.abs()).all(), "each value for itself, however small"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, allow_neg_eigval: bool) -> None:
    check(device, *inputs(2, 37, 6, dtype=dtype), allow_neg_eigval=allow_neg_eigval)


def test_dtypes_may_differ(device: torch.device) -> None:
    A_log, a, b, dt_bias = inputs(2, 5, 4)
    check(device, A_log, a.bfloat16(), b.half(), dt_bias.bfloat16())


def test_the_far_ends(device: torch.device) -> None:
    """softplus(x) is x for a large x and exp(x) for a small one, without overflow."""
    a = torch.tensor([-1e4, -80.0, -20.0, -1.0, 0.0, 16.0, 20.0, 88.0, 1e4, torch.inf])[:, None]
    g, beta = gate(device, torch.zeros(1), a, a)
    exact = -torch.nn.functional.softplus(a.double(), threshold=1e9)
    assert ((g - exact).abs()[:-1] <= 6e-7 * exact.abs()[:-1] + 1e-36).all() and g[-1] == -torch.inf
    torch.testing.assert_close(beta, torch.sigmoid(a.double()).float(), rtol=6e-7, atol=1e-36)


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_gdn_gate(device: torch.device, output_dtype: torch.dtype) -> None:
    A_log, a, _, dt_bias = inputs(2, 37, 6, dtype=torch.bfloat16)
    g = torch_gdn.fused_gdn_gate(a.to(device), A_log.to(device), dt_bias.to(device), output_dtype).cpu()
    exact, _ = reference.gdn_gating(A_log.double(), a.double(), a.double(), dt_bias.double())
    assert g.dtype == output_dtype
    assert_close("g", g, exact, ROUNDING[output_dtype], head_dim=2)


def test_fused_gdn_gate_refuses_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"output_dtype: expected bfloat16, float16 or float32, got float64"):
        torch_gdn.fused_gdn_gate(torch.zeros(2), torch.zeros(2), output_dtype=torch.float64)
