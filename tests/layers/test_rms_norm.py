from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, assert_same_bits, relative_error, sum_error
from torch_gdn import reference
from torch_gdn_check.registry.bounds import ROUNDING


def normalise(
    device: torch.device, x: Tensor, weight: Tensor | None, residual: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    on_device = [None if each is None else each.to(device) for each in (x, weight, residual)]
    y, h = launched(device, "rms_norm", torch.ops.gdn.rms_norm, *on_device, **options)
    return y.cpu(), h.cpu()


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, weight and residual."""
    return torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype), 3 * torch.randn(shape).to(dtype)


def exact(x: Tensor, weight: Tensor | None, residual: Tensor | None, *options: Any) -> Tensor:
    doubles = [None if each is None else each.double() for each in (x, weight, residual)]
    return reference.rms_norm(*doubles, *options)[0]


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("D", [33, 256, 1024, 2050, 5120])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, D: int, zero_centered: bool) -> None:
    x, weight, residual = inputs(3, 2, D, dtype=dtype)
    y, h = normalise(device, x, weight, residual, eps=1e-5, zero_centered=zero_centered)
    assert y.dtype == h.dtype == dtype and y.is_contiguous() and h.is_contiguous()
    bound = ROUNDING[dtype] + sum_error(D, dtype)
    assert_close("y", y, exact(x, weight, residual, 1e-5, zero_centered), bound)
    assert_same_bits("h", h, (x.float() + residual.float()).to(dtype))


def test_the_sum_is_not_rounded_before_the_norm(device: torch.device) -> None:
    x, weight, residual = inputs(50, 128, dtype=torch.bfloat16)
    y, h = normalise(device, x, weight, residual)
    from_rounded, _ = normalise(device, h, weight)
    right = exact(x, weight, residual)
    assert relative_error(y.double(), right) < 0.8 * relative_error(from_rounded.double(), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_transformers_does(device: torch.device, dtype: torch.dtype) -> None:
    """Qwen3-Next's layer rounds once, OLMo-Hybrid's twice. Results are equal except for a few values that differ by one
    ulp.
    """
    models = "transformers.models"
    zero_centered = pytest.importorskip(f"{models}.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNorm(256)
    plain = pytest.importorskip(f"{models}.qwen3.modeling_qwen3").Qwen3RMSNorm(256)
    x, weight, _ = inputs(50, 256, dtype=dtype)
    for norm, options in ((zero_centered, {"zero_centered": True}), (plain, {"round_norm": True})):
        norm.weight.data = weight
        with torch.no_grad():
            expected = norm(x)
        y, _ = normalise(device, x, weight, **options)
        assert (y != expected).sum() < 0.002 * y.numel()
        other, _ = normalise(device, x, weight, **(options | {"round_norm": "round_norm" not in options}))
        assert (other != expected).sum() > 0.05 * y.numel(), "the other order gives other bits"


def test_a_weight_of_another_dtype(device: torch.device) -> None:
    x, weight, residual = inputs(3, 64, dtype=torch.bfloat16)
    y, _ = normalise(device, x, weight.float() / 3, residual)
    assert_close("y", y, exact(x, weight.float() / 3, residual), ROUNDING[torch.bfloat16], head_dim=None)


def test_the_function_has_fla_s_arguments(device: torch.device) -> None:
    x, weight, residual = (each.to(device) for each in inputs(3, 64))
    y, h = torch.ops.gdn.rms_norm(x, weight, residual, 1e-5)
    result = torch_gdn.rms_norm(x, weight, None, residual, 1e-5, True)
    assert torch.equal(result[0], y) and torch.equal(result[1], h)
    assert torch.equal(torch_gdn.rms_norm(x, weight, None, residual, 1e-5), y)
    assert torch_gdn.rms_norm(x, weight, prenorm=True)[1] is x
    with pytest.raises(ValueError, match=r"bias: expected None"):
        torch_gdn.rms_norm(x, weight, weight)
