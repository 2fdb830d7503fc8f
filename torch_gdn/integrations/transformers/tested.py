"""Tests the ops that models call in every dtype that a model has, before the model's first call with it.

`enable()` tests the usual dtype and those of the models that exist. A model that is loaded later has its dtype tested
when it first runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_gdn import self_test

if TYPE_CHECKING:
    from torch_gdn.self_test.cases import Case

USUAL = torch.bfloat16  # of most checkpoints

ops: list[str] = []  # what the enabled models call
dtypes: set[torch.dtype] = {USUAL}  # in which they were tested


def needed_cases() -> list[Case]:
    from torch_gdn.self_test.cases import cases_of  # here: it is needed where there is an mps device

    return cases_of(ops, sorted(dtypes, key=str))


def test(called: Iterable[str], existing: Iterable[torch.dtype]) -> None:
    ops[:] = called
    dtypes.update(existing)
    self_test.ensure(needed_cases)


def test_dtype_of(*arguments: Any) -> None:
    """Tests the ops in the dtype of a call's first tensor on mps, unless they were."""
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point():
            if x.dtype not in dtypes and x.device.type == "mps":
                test(ops[:], [x.dtype])
            return
