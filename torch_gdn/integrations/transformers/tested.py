"""Tests the ops that models call in the dtypes and head sizes of a model, before the model's first call with them.

`enable()` tests the usual ones, and the dtypes of models that exist. What else a model has is tested when it first
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_gdn import self_test
from torch_gdn.integrations.transformers.functions import DELTA_RULES, KDA_FUNCTIONS

if TYPE_CHECKING:
    from torch_gdn.self_test.cases import Case

Form = tuple[torch.dtype, tuple[int, int]]
USUAL_DTYPE, USUAL_SIZES = torch.bfloat16, (128, 128)  # K and V of Qwen3-Next and Qwen3.5

ops: list[str] = []  # what the enabled models call
forms: set[Form] = {(USUAL_DTYPE, USUAL_SIZES)}  # tested dtypes and sizes


def needed_cases() -> Iterator[Case]:
    from torch_gdn.self_test.cases import cases_of  # here, because only machines with an mps device need it

    for dtype, (K, V) in sorted(forms, key=str):
        for case in cases_of(ops, [dtype]):
            sizes: dict[str, Any] = {"K": K, "V": V} if hasattr(case.point, "state_v_first") else {}  # a rule's point
            yield replace(case, point=replace(case.point, **sizes))


def test(called: Iterable[str], existing: Callable[[], Iterable[torch.dtype]]) -> None:
    """Tests these ops, also in the dtypes that `existing` returns. It is called only if there is something to test."""

    def cases() -> Iterator[Case]:
        forms.update((dtype, USUAL_SIZES) for dtype in existing())
        return needed_cases()

    ops[:] = called
    self_test.ensure(cases)


def test_call(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tests the ops in the form of a call on mps. Returns False if they were before, or need not be."""
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
    if x is None or x.device.type != "mps":
        return False
    is_rule = function in (*DELTA_RULES, *KDA_FUNCTIONS) and len(args) > 2
    form = (x.dtype, (args[0].shape[-1], args[2].shape[-1]) if is_rule else USUAL_SIZES)
    if form in forms:
        return False
    forms.add(form)
    self_test.ensure(needed_cases)
    return True
