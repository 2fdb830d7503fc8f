from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, sum_error
from torch_gdn import reference

BOUND = {torch.float32: 2e-7, torch.bfloat16: 1.8e-3, torch.float16: 2.2e-4}
BLOCK = 1024  # squares that the CPU kernel sums at a time


def normalise(device: torch.device, x: Tensor, **options: float) -> Tensor:
    return launched(device, "l2norm", torch_gdn.l2norm, x.to(device), **options).cpu()


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [60, 1024, 2500])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2, 5, 3, width).to(dtype)
    y = normalise(device, x)
    assert y.dtype == dtype and y.is_contiguous()
    assert_close("l2norm", y, reference.l2norm(x.double()), BOUND[dtype] + sum_error(min(width, BLOCK), dtype))


def test_eps_is_added_to_the_sum(device: torch.device) -> None:
    x = torch.full((1, 4), 1e-3)
    y = normalise(device, x, eps=1e-3)
    assert_close("l2norm", y, reference.l2norm(x.double(), eps=1e-3), BOUND[torch.float32], head_dim=None)


@pytest.mark.parametrize("shape", [(2, 0, 64), (2, 3, 0), (0,)], ids=str)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_no_elements(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y, rstd = torch_gdn.l2norm_fwd(torch.zeros(shape, device=device, dtype=dtype), eps=0.25)
    assert y.shape == shape and y.dtype == dtype and y.device.type == device.type
    assert torch.equal(rstd.cpu(), torch.full(shape[:-1], 2.0))


@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 5, 2500), (1, 1_000_000)], ids=str)
def test_l2norm_fwd_gives_the_factor_too(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y, rstd = launched(device, "l2norm", torch_gdn.l2norm_fwd, x.to(device))
    bound = BOUND[torch.float32] + sum_error(min(shape[-1], BLOCK), torch.float32)
    assert_close("rstd", rstd, reference.l2norm_fwd(x.double())[1], bound, head_dim=None)
    assert torch.equal(y.cpu(), x * rstd.cpu()[..., None])
