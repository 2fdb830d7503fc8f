from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import kernels_run
from tests.helpers.errors import STAGE_OUTPUT, assert_close, chunk_f32
from torch_gdn import reference
from torch_gdn.testing.stages import stages_of


def check(
    device: torch.device,
    case: Case,
    chunk_size: int = 64,
    state_v_first: bool = False,
    scale: float | None = None,
) -> None:
    stages = stages_of(case, chunk_size, state_v_first)
    inputs = (case.q, case.k, stages.v_new, stages.h, stages.g_cumsum)
    with kernels_run(device, "chunk_fwd_o"):
        o = torch_gdn.chunk_fwd_o(
            *(x.to(device) for x in inputs),
            scale=scale,
            state_v_first=state_v_first,
            cu_seqlens=case.cu_seqlens,
            chunk_size=chunk_size,
            chunk_indices=stages.chunk_indices,
        )
    assert o.dtype == case.dtype and o.is_contiguous()
    exact = reference.chunk_fwd_o(*(x.double() for x in inputs), scale, state_v_first, case.cu_seqlens, chunk_size)
    assert_close("o", o, exact, STAGE_OUTPUT.get(case.dtype, chunk_f32(case.largest_g_cumsum(chunk_size))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 130])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, T: int) -> None:
    check(device, make_case(T, B=2, H=2, HV=4, dtype=dtype))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device: torch.device, chunk_size: int) -> None:
    check(device, make_case(50, H=1, HV=3), chunk_size)


@pytest.mark.parametrize(("K", "V"), [(60, 100), (128, 128), (256, 64), (96, 192)])
def test_sizes(device: torch.device, K: int, V: int) -> None:
    check(device, make_case(70, K, V))


def test_state_v_first(device: torch.device) -> None:
    check(device, make_case(130, 64, 32), state_v_first=True)


def test_scale(device: torch.device) -> None:
    check(device, make_case(70), scale=0.3)


def test_packed_sequences(device: torch.device) -> None:
    check(device, make_case(150, cu_seqlens=[0, 17, 17, 81, 150]))
