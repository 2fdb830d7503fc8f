from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, relative_error
from torch_gdn import reference
from torch_gdn_check.registry.bounds import ROUNDING


def normalise(device: torch.device, x: Tensor, g: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    on_device = [None if each is None else each.to(device) for each in (x, g, weight)]
    return launched(device, "rms_norm_gated", torch.ops.gdn.rms_norm_gated, *on_device, **options).cpu()


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(shape).to(dtype), 3 * torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("D", [33, 128, 192])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, D: int, activation: str) -> None:
    x, g, weight = inputs(2, 5, 3, D, dtype=dtype)
    y = normalise(device, x, g, weight, activation=activation, eps=1e-5)
    assert y.dtype == dtype and y.is_contiguous()
    exact = reference.rms_norm_gated(x.double(), g.double(), weight.double(), 1e-5, activation)
    assert_close("y", y, exact, ROUNDING[dtype])


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounds_where_transformers_does(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Results are equal except for a few values that differ by one ulp, because the sum has another order."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = modeling.Qwen3NextRMSNormGated(128, eps=1e-6)
    x, g, weight = inputs(50, 128, dtype=dtype)
    norm.weight.data = weight = weight.to(weight_dtype)
    with torch.no_grad():
        expected = norm(x, g)
    y = normalise(device, x, g, weight, round_norm=True)
    if dtype == torch.float32:
        assert_close("y", y, expected.double(), 5e-7, head_dim=None)
        return
    assert (y != expected).sum() < 0.002 * y.numel()
    ones = normalise(device, x, g, weight)
    assert (ones != expected).sum() > 0.05 * y.numel(), "the other order gives other bits"
    assert relative_error(ones.double(), expected.double()) < 6e-3


def test_one_rounding_is_closer(device: torch.device) -> None:
    x, g, weight = inputs(50, 128, dtype=torch.bfloat16)
    exact = reference.rms_norm_gated(x.double(), g.double(), weight.double())
    once, thrice = (relative_error(normalise(device, x, g, weight, round_norm=each).double(), exact) for each in (0, 1))
    assert once < 0.8 * thrice


@pytest.mark.parametrize("gate", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_may_differ(device: torch.device, gate: torch.dtype) -> None:
    """x is in float32, as from output_dtype, and its gate has the projection's dtype."""
    x, g, weight = inputs(3, 64)
    g, weight = g.to(gate), weight.half()
    y = normalise(device, x, g, weight)
    assert y.dtype == torch.float32
    assert_close("y", y, reference.rms_norm_gated(x.double(), g.double(), weight.double()), 3e-7, head_dim=None)


def test_gates_saturate(device: torch.device) -> None:
    g = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 1e4]])
    x = torch.ones(1, 6)
    y = normalise(device, x, g, None, activation="sigmoid", eps=0.0)
    torch.testing.assert_close(y, torch.sigmoid(g.double()).float(), rtol=1e-6, atol=1e-37)
    silu = normalise(device, x, g, None, eps=0.0)
    torch.testing.assert_close(silu, torch.nn.functional.silu(g.double()).float(), rtol=1e-6, atol=1e-35)


def test_the_function_has_fla_s_arguments(device: torch.device) -> None:
    x, g, weight = (each.to(device) for each in inputs(3, 64))
    expected = torch.ops.gdn.rms_norm_gated(x, g, weight, "sigmoid", 1e-5)
    assert torch.equal(torch_gdn.rms_norm_gated(x, g, weight, None, "sigmoid", eps=1e-5), expected)
    with pytest.raises(ValueError, match=r"bias: expected None"):
        torch_gdn.rms_norm_gated(x, g, weight, weight)
