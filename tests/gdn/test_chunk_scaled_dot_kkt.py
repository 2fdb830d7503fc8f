from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import Case, make_case
from tests.helpers.devices import kernels_run, launched
from tests.helpers.errors import assert_close, chunk_f32
from torch_gdn import reference
from torch_gdn.testing.stages import stages_of


def compute(device: torch.device, case: Case, chunk_size: int = 64) -> tuple[Tensor, Tensor]:
    """A on the device and the exact one."""
    g = stages_of(case, chunk_size).g_cumsum
    with kernels_run(device, "chunk_scaled_dot_kkt"):
        A = torch_gdn.chunk_scaled_dot_kkt(
            case.k.to(device), g.to(device), case.beta.to(device), case.cu_seqlens, chunk_size
        )
    assert A.dtype == torch.float32 and A.is_contiguous()
    exact = reference.chunk_scaled_dot_kkt(case.k.double(), g.double(), case.beta.double(), case.cu_seqlens, chunk_size)
    return A.cpu(), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 65])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, T: int) -> None:
    case = make_case(T, B=2, H=2, HV=4, dtype=dtype)
    A, exact = compute(device, case)
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum()))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device: torch.device, chunk_size: int) -> None:
    case = make_case(50, H=1, HV=3)
    A, exact = compute(device, case, chunk_size)
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum(chunk_size)))


@pytest.mark.parametrize("K", [60, 100, 128, 256])
def test_key_sizes(device: torch.device, K: int) -> None:
    case = make_case(70, K)
    A, exact = compute(device, case)
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum()))


def test_packed_sequences(device: torch.device) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150])
    A, exact = compute(device, case)
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum()))


def test_everything_but_the_strictly_lower_part_is_zero(device: torch.device) -> None:
    A, exact = compute(device, make_case(80))
    assert torch.equal(A == 0, exact == 0)


def test_growing_gates_do_not_overflow_above_the_diagonal(device: torch.device) -> None:
    """exp(g_i - g_j) for j > i would be infinite; times a mask of zeros it would be NaN."""
    case = make_case(64)
    case.g = torch.full_like(case.g, -20.0)
    A, exact = compute(device, case)
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum()))


def test_takes_views_of_a_fused_projection(device: torch.device) -> None:
    case = make_case(40, H=2, HV=2)
    fused = torch.randn(1, 40, 3, 2, 64)
    fused[:, :, 1] = case.k
    view = fused.to(device)[:, :, 1]
    g = stages_of(case).g_cumsum
    inputs = (view, g.to(device), case.beta.to(device))
    A = launched(device, "chunk_scaled_dot_kkt", torch_gdn.chunk_scaled_dot_kkt, *inputs)
    exact = reference.chunk_scaled_dot_kkt(case.k.double(), g.double(), case.beta.double())
    assert_close("A", A, exact, chunk_f32(case.largest_g_cumsum()))


def test_without_g_and_beta_it_is_the_plain_product(device: torch.device) -> None:
    k = make_case(30).k
    A = launched(device, "chunk_scaled_dot_kkt", torch_gdn.chunk_scaled_dot_kkt, k.to(device), chunk_size=32)
    assert_close(
        "A", A[:, :, 0, :30], (k[0, :, 0].double() @ k[0, :, 0].double().T).tril(-1)[None], 2e-6, head_dim=None
    )
