from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn.testing.stages import stages_of

# What forward substitution reaches with repeated keys and beta 1.9 is 1.6e-6 by experiment, and 1e-9 otherwise.
BOUND, HARD_BOUND = 2e-7, 5e-6


def inverse(device: torch.device, A: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    with kernels_run(device, "solve_tril"):
        result = torch_gdn.solve_tril(A.to(device), cu_seqlens)
    assert result.dtype == torch.float32 and result.is_contiguous()
    return result.cpu()


@pytest.mark.parametrize("T", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_equals_the_reference(device: torch.device, T: int, chunk_size: int) -> None:
    A = stages_of(make_case(T, B=2, HV=3), chunk_size).A
    assert_close("A_inv", inverse(device, A), reference.solve_tril(A.double()), BOUND)


@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_repeated_keys(device: torch.device, beta: float) -> None:
    """Powers of A grow to 1e18, which no Neumann series in float32 tolerates."""
    case = make_case(128, beta=beta, same_keys=True)
    case.g = torch.zeros_like(case.g)
    A = stages_of(case).A
    assert_close("A_inv", inverse(device, A), reference.solve_tril(A.double()), HARD_BOUND)


def test_packed_sequences(device: torch.device) -> None:
    case = make_case(150, cu_seqlens=[0, 17, 17, 81, 150])
    A = stages_of(case).A
    exact = reference.solve_tril(A.double(), case.cu_seqlens)
    assert_close("A_inv", inverse(device, A, case.cu_seqlens), exact, BOUND)


def test_reads_only_the_strictly_lower_part_of_the_chunk(device: torch.device) -> None:
    A = stages_of(make_case(70)).A
    column = torch.arange(64)
    rows = torch.arange(70)[:, None] % 64
    dirty = torch.where((column >= rows)[None, :, None], torch.tensor(torch.nan), A)
    assert torch.equal(inverse(device, dirty), inverse(device, A))


def test_columns_past_the_end_of_a_short_chunk_are_zero(device: torch.device) -> None:
    A = stages_of(make_case(70)).A
    assert torch.equal(inverse(device, A)[0, 64:, :, 6:], torch.zeros(6, 2, 58))


def test_takes_any_strides(device: torch.device) -> None:
    A = stages_of(make_case(70)).A
    larger = torch.randn(1, 70, 4, 70)
    larger[:, :, 1:3, 3:67] = A
    view = larger.to(device)[:, :, 1:3, 3:67]
    assert torch.equal(inverse(device, view), inverse(device, A))


def test_no_tokens(device: torch.device) -> None:
    assert torch_gdn.solve_tril(torch.zeros(1, 0, 2, 64, device=device)).shape == (1, 0, 2, 64)
