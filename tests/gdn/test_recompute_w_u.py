from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import STAGE_OUTPUT, assert_close, chunk_f32
from torch_gdn import reference
from torch_gdn.testing.stages import stages_of


def check(device: torch.device, case: Case, chunk_size: int = 64) -> None:
    stages = stages_of(case, chunk_size)
    inputs = (case.k, case.v, case.beta, stages.A_inv, stages.g_cumsum)
    with kernels_run(device, "recompute_w_u"):
        w, u = torch_gdn.recompute_w_u(*(x.to(device) for x in inputs), case.cu_seqlens)
    assert w.dtype == u.dtype == case.dtype and w.is_contiguous() and u.is_contiguous()
    exact_w, exact_u = reference.recompute_w_u(*(x.double() for x in inputs), case.cu_seqlens)
    bound = STAGE_OUTPUT.get(case.dtype, chunk_f32(case.largest_g_cumsum(chunk_size)))
    assert_close("w", w, exact_w, bound)
    assert_close("u", u, exact_u, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 65])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, T: int) -> None:
    check(device, make_case(T, B=2, H=2, HV=4, dtype=dtype))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device: torch.device, chunk_size: int) -> None:
    check(device, make_case(50, H=1, HV=3), chunk_size)


@pytest.mark.parametrize(("K", "V"), [(60, 100), (128, 128), (256, 64), (96, 192)])
def test_sizes(device: torch.device, K: int, V: int) -> None:
    check(device, make_case(70, K, V))


def test_packed_sequences(device: torch.device) -> None:
    check(device, make_case(150, cu_seqlens=[0, 17, 17, 81, 150]))


def test_does_not_read_A_past_the_end_of_a_short_chunk(device: torch.device) -> None:
    case = make_case(70)
    stages = stages_of(case)
    dirty = stages.A_inv.clone()
    dirty[:, 64:, :, 6:] = torch.nan
    inputs = [case.k, case.v, case.beta, dirty, stages.g_cumsum]
    w, u = launched(device, "recompute_w_u", torch_gdn.recompute_w_u, *(x.to(device) for x in inputs))
    assert w.isfinite().all() and u.isfinite().all()
