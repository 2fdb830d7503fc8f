from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import STAGE_OUTPUT, assert_close, chunk_f32
from torch_gdn import reference
from torch_gdn.testing.stages import Stages, stages_of


def state_of(case: Case, state_v_first: bool) -> Tensor | None:
    if case.initial_state is None or not state_v_first:
        return case.initial_state
    return case.initial_state.transpose(-1, -2).contiguous()


def compute(
    device: torch.device, case: Case, stages: Stages, chunk_size: int, state_v_first: bool, given_indices: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    state = state_of(case, state_v_first)
    with kernels_run(device, "chunk_fwd_h"):
        return torch_gdn.chunk_fwd_h(
            case.k.to(device),
            stages.w.to(device),
            stages.u.to(device),
            stages.g_cumsum.to(device),
            initial_state=None if state is None else state.to(device),
            output_final_state=True,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
            cu_seqlens=case.cu_seqlens,
            chunk_indices=stages.chunk_indices if given_indices else None,
        )


def check(
    device: torch.device,
    case: Case,
    chunk_size: int = 64,
    state_v_first: bool = False,
    given_indices: bool = False,
) -> None:
    stages = stages_of(case, chunk_size)
    h, v_new, final_state = compute(device, case, stages, chunk_size, state_v_first, given_indices)
    state = state_of(case, state_v_first)
    exact = reference.chunk_fwd_h(
        case.k.double(),
        stages.w.double(),
        stages.u.double(),
        stages.g_cumsum.double(),
        None if state is None else state.double(),
        True,
        chunk_size,
        state_v_first,
        case.cu_seqlens,
        stages.chunk_indices if given_indices else None,
    )
    assert final_state is not None and exact[2] is not None
    assert h.dtype == v_new.dtype == case.dtype and final_state.dtype == torch.float32
    assert h.is_contiguous() and v_new.is_contiguous() and final_state.is_contiguous()
    bound = STAGE_OUTPUT.get(case.dtype, chunk_f32(case.largest_g_cumsum(chunk_size)))
    assert_close("h", h, exact[0], bound)
    assert_close("v_new", v_new, exact[1], bound)
    assert_close("final_state", final_state, exact[2], bound, head_dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, state: bool) -> None:
    check(device, make_case(130, B=2, H=2, HV=4, dtype=dtype, state=state))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device: torch.device, chunk_size: int) -> None:
    check(device, make_case(50, H=1, HV=3), chunk_size)


@pytest.mark.parametrize(("K", "V"), [(60, 100), (128, 128), (256, 64), (96, 192)])
def test_sizes(device: torch.device, K: int, V: int) -> None:
    check(device, make_case(70, K, V))


def test_state_v_first(device: torch.device) -> None:
    check(device, make_case(130, 64, 32), state_v_first=True)


@pytest.mark.parametrize("given_indices", [False, True])
def test_packed_sequences(device: torch.device, given_indices: bool) -> None:
    """Without chunk_indices h has surplus rows, which are zeros as in the reference."""
    check(device, make_case(150, cu_seqlens=[0, 17, 17, 81, 150]), given_indices=given_indices)


def test_bounds_on_the_device(device: torch.device) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150])
    stages = stages_of(case)
    expected = compute(device, case, stages, 64, False, False)
    assert case.cu_seqlens is not None
    case.cu_seqlens = case.cu_seqlens.to(device)
    for ours, theirs in zip(compute(device, case, stages, 64, False, False), expected, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours.cpu(), theirs.cpu())


def test_final_state_is_none_unless_asked_for(device: torch.device) -> None:
    case = make_case(20)
    stages = stages_of(case)
    inputs = (case.k, stages.w, stages.u, stages.g_cumsum)
    results = launched(device, "chunk_fwd_h", torch_gdn.chunk_fwd_h, *(x.to(device) for x in inputs))
    assert results[2] is None
