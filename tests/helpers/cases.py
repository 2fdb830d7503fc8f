"""Runs the end-to-end ops on cases (check/torch_gdn_check/registry/cases.py) and compares with the exact results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.helpers import errors
from tests.helpers.devices import kernels_run
from tests.helpers.prefill import kernels_of
from torch_gdn_check.registry.cases import END_TO_END_OPS, Case, bounds_of, make_case
from torch_gdn_check.registry.inputs import is_floating

__all__ = ["END_TO_END_OPS", "Case", "assert_exact", "make_case", "pool_with_gaps", "run"]


def run(op: str, case: Case, device: torch.device, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs the op on the device, asserts that its kernels ran, and returns the results on the CPU."""
    on_device = case.to(device)
    options = {name: x.to(device) if is_floating(x) else x for name, x in options.items()}
    with kernels_run(device, *kernels_of(op, case, device, **options)):
        o, state = END_TO_END_OPS[op](*on_device.qkv, **(on_device.options | options))
    assert state is not None
    return o.cpu(), state.cpu()


def assert_exact(op: str, case: Case, result: tuple[Tensor, Tensor], **options: Any) -> None:
    """Asserts that the op's result with these options is within its bounds of the float64 recurrence."""
    exact = case.exact(**options)
    o_bound, state_bound = bounds_of(op, case, exact, **options)
    output_dtype = options.get("output_dtype") or case.dtype
    assert result[0].dtype == output_dtype and result[1].dtype == torch.float32
    errors.assert_close("o", result[0], exact[0], o_bound, head_dim=2)
    errors.assert_close("final_state", result[1], exact[1], state_bound, head_dim=1)


def pool_with_gaps(device: torch.device, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """Returns a storage, and a pool of states [slots, ...] in it. As in servers, other data lies between the slots."""
    size = math.prod(shape[1:])
    storage = torch.randn(shape[0], size + 24, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    return storage, storage[:, :size].view(shape)
