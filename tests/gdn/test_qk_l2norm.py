"""Tests use_qk_l2norm_in_kernel with short and zero rows of q and k, which left-padded prompts have.

eps is added to the squared length: rows of zeros stay zero, and a squared length near eps shortens its row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.cases import Case, make_case, run
from tests.helpers.errors import assert_close
from tests.helpers.prefill import each_op
from torch_gdn_check.registry.cases import bounds_of

pytestmark = pytest.mark.sweep(8)

NORM = {"use_qk_l2norm_in_kernel": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The chunked algorithm rounds the normalised q and k to their dtype, as FLA does. The error of a head of bf16 was then
# 3.6e-3; with normalised inputs the bound is 3.5e-3.
ROUNDING = {torch.bfloat16: 1.1}
PADDING = 18  # longer than a chunk of the fused chunk algorithm


def assert_exact(op: str, case: Case, result: tuple[Tensor, Tensor]) -> None:
    exact = case.exact(**NORM)
    o_bound, state_bound = (bound * ROUNDING.get(case.dtype, 1.0) for bound in bounds_of(op, case, exact, **NORM))
    assert_close("o", result[0], exact[0], o_bound, head_dim=2)
    assert_close("final_state", result[1], exact[1], state_bound, head_dim=1)


def padded_case(dtype: torch.dtype, state: bool = True) -> Case:
    """Makes a case in which row 0 of the batch begins with padding, and tokens of zeros follow here and there."""
    case = make_case(70, B=2, dtype=dtype, normal=False, state=state)
    for x in (case.q, case.k):
        x[0, :PADDING] = 0
        x[1, [0, 5, 33, 69]] = 0
    return case


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_rows_of_zeros(device: torch.device, op: str, dtype: torch.dtype, state: bool) -> None:
    case = padded_case(dtype, state)
    o, final_state = run(op, case, device, **NORM)
    assert_exact(op, case, (o, final_state))
    assert (o[0, :PADDING] == 0).all() and (o[1, [0, 5, 33, 69]] == 0).all()


@each_op("chunked", "recurrent")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensors", ["q", "k", "qk"])
def test_rows_near_eps(device: torch.device, op: str, dtype: torch.dtype, tensors: str) -> None:
    """With squared lengths of 1e-7 to 1e-5, a row's factor is 300 to 950. Without eps it would be 316 to 3,162."""
    case = make_case(70, B=2, dtype=dtype, normal=False)
    squared_lengths = torch.logspace(-7, -5, 70, dtype=torch.float64)[:, None, None]
    for name in tensors:
        x = getattr(case, name).double()
        setattr(case, name, (x / x.norm(dim=-1, keepdim=True) * squared_lengths.sqrt()).to(dtype))
    assert_exact(op, case, run(op, case, device, **NORM))
