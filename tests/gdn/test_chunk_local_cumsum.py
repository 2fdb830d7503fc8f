from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import assert_close
from torch_gdn import reference

# A sum of 64 numbers of one sign in float32, in any order, is off by 6 roundings of 6e-8 if summed pairwise, 63 if not.
BOUND = 1e-6


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_equals_the_reference(device: torch.device, T: int, chunk_size: int) -> None:
    g = make_case(T, B=2, HV=3).g
    with kernels_run(device, "chunk_local_cumsum"):
        sums = torch_gdn.chunk_local_cumsum(g.to(device), chunk_size)
    assert sums.dtype == torch.float32 and sums.is_contiguous()
    assert_close("g_cumsum", sums, reference.chunk_local_cumsum(g.double(), chunk_size), BOUND)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_restarts_at_each_sequence(device: torch.device, index_dtype: torch.dtype, where: str) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150])
    assert case.cu_seqlens is not None
    cu = case.cu_seqlens.to(index_dtype)
    if where == "device":
        cu = cu.to(device)
    with kernels_run(device, "chunk_local_cumsum"):
        sums = torch_gdn.chunk_local_cumsum(case.g.to(device), cu_seqlens=cu)
    assert_close("g_cumsum", sums, reference.chunk_local_cumsum(case.g.double(), 64, case.cu_seqlens), BOUND)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_takes_any_floating_dtype(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "mps" and dtype == torch.float64:
        pytest.skip("mps has no float64")
    g = make_case(70).g.to(dtype)
    with kernels_run(device, "chunk_local_cumsum"):
        sums = torch_gdn.chunk_local_cumsum(g.to(device))
    assert_close("g_cumsum", sums, reference.chunk_local_cumsum(g.double()), BOUND)


def test_minus_infinity_counts_as_minus_104(device: torch.device) -> None:
    g = torch.zeros(1, 20, 1)
    g[0, 3], g[0, 5] = -torch.inf, -1e3
    expected = torch.zeros(1, 20, 1)
    expected[0, 3:] -= 104
    expected[0, 5:] -= 104
    sums = launched(device, "chunk_local_cumsum", torch_gdn.chunk_local_cumsum, g.to(device))
    assert torch.equal(sums.cpu(), expected)


def test_takes_any_strides(device: torch.device) -> None:
    g = make_case(40, B=2, HV=3).g
    view = g.permute(2, 0, 1).contiguous().to(device).permute(1, 2, 0)
    assert view.stride(-1) != 1
    sums = launched(device, "chunk_local_cumsum", torch_gdn.chunk_local_cumsum, view, 16)
    assert_close("g_cumsum", sums, reference.chunk_local_cumsum(g.double(), 16), BOUND)


def test_no_tokens(device: torch.device) -> None:
    assert torch_gdn.chunk_local_cumsum(torch.zeros(2, 0, 3, device=device)).shape == (2, 0, 3)
