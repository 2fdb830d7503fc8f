"""Tests that what torch_gdn computes for itself neither depends on the process's settings nor changes them, because
other threads use them: the default dtype and device, and the random numbers of the CPU and of `mps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import ready
from tests.helpers.errors import assert_same_bits
from torch_gdn import self_test
from torch_gdn.self_test import verdicts
from torch_gdn.tools import tuning_cache
from torch_gdn_check.registry import REGISTRY, OpEntry
from torch_gdn_check.registry.inputs import Call, to_device

each_op = pytest.mark.parametrize("entry", REGISTRY.values(), ids=REGISTRY)


@contextmanager
def process_of(dtype: torch.dtype) -> Iterator[None]:
    """Has this default dtype. Refuses changes of the process, and asserts that nothing drew its random numbers."""
    torch.set_default_dtype(dtype)
    before = torch.default_generator.get_state()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("manual_seed", "set_default_dtype"):
                patch.setattr(torch, name, lambda *_: pytest.fail("another thread would see this"))
            yield
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.default_generator.get_state(), before)


def assert_same_call(call: Call, expected: Call) -> None:
    assert call.keys() == expected.keys()
    for name, x in expected.items():
        if isinstance(x, Tensor):
            assert call[name].dtype == x.dtype, name
            assert_same_bits(name, call[name], x)
        else:
            assert call[name] == x, name


@each_op
def test_an_entry_draws_the_same_call_in_any_process(entry: OpEntry[Any]) -> None:
    expected = entry.smallest()
    torch.manual_seed(1)
    with process_of(torch.bfloat16):
        assert_same_call(entry.smallest(), expected)


@each_op
def test_an_op_computes_the_same_in_autocast(entry: OpEntry[Any], device: torch.device) -> None:
    """Kernels may leave products to PyTorch, which autocast would round."""
    first, second = (to_device(entry.smallest(), device) for _ in range(2))  # an op may write to its arguments
    expected = entry.outputs(first, entry.run(first))
    with torch.autocast(device.type, torch.bfloat16):
        result = entry.outputs(second, entry.run(second))
    for name, x in result.items():
        assert_same_bits(name, x, expected[name])


def test_the_self_test_judges_alike_in_any_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(self_test.VARIABLE, "auto")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "table.json"))
    call = to_device(REGISTRY["rms_norm_gated"].smallest(), ready("mps"))
    self_test.install()
    try:
        with process_of(torch.float64):  # which mps does not have
            REGISTRY["rms_norm_gated"].run(call)
        [verdict] = verdicts.read(verdicts.machine()).values()
        assert verdict.problem == ""
    finally:
        self_test.install()
