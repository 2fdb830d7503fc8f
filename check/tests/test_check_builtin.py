"""Tests the check's times of PyTorch's own kernels for experts and for weights of 4 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from torch_gdn_check import timing
from torch_gdn_check.steps import FAIL, PASS, SKIPPED, Step, execute

CPU = torch.device("cpu")


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiplies rows up to offs[0] by b[0], the next ones up to offs[1] by b[1], and so on."""
    assert offs.dtype == torch.int32 and offs[-1] == len(a) and b.stride(-2) == 1
    parts = a.tensor_split(offs[:-1].tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, b, strict=True)])


def int4pack_mm(a: torch.Tensor, codes: torch.Tensor, group: int, pairs: torch.Tensor) -> torch.Tensor:
    """Decodes (code - 8) scale + zero. codes [N, K / 2] have even columns in a byte's upper half; pairs [K / group, N,
    2].
    """
    assert codes.dtype == torch.uint8 and pairs.dtype == a.dtype and pairs.is_contiguous()
    scales, zeros = pairs.mT.unbind(1)
    columns = torch.stack([codes >> 4, codes & 15], -1).flatten(1) - 8.0
    numbers = columns * scales.T.repeat_interleave(group, 1) + zeros.T.repeat_interleave(group, 1)
    return (a.float() @ numbers.mT).to(a.dtype)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("kernel", ["experts", "4 bits"])
def test_pytorchs_own_kernels_are_timed_where_it_has_them(
    kernel: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins have the arguments and layouts of PyTorch's kernels for mps."""
    steps = {"experts": partial(timing.check_experts, tokens=3, sizes=(16, 64, 32))}
    step = Step("timing", kernel, "", steps.get(kernel, partial(timing.check_packed, rows=2, size=128)))
    missing = execute(step, CPU)
    assert missing.status == SKIPPED
    assert missing.message.startswith("torch ") and "for cpu; it has one" in missing.message
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: key == "CPU")
        error = 1.0 if is_right else 1.1
        patch.setattr(torch, "_grouped_mm", lambda *call, offs: error * grouped_mm(*call, offs))
        patch.setattr(torch, "_convert_weight_to_int4pack", lambda codes, tiles: codes)
        patch.setattr(torch, "_weight_int4pack_mm", lambda *call: error * int4pack_mm(*call))
        result = execute(step, CPU)
    assert result.status == (PASS if is_right else FAIL), result.message
    times = {name: result.figures[name]["seconds"] for name in ("torch_gdn", "pytorch")}
    assert result.figures["fastest"] == min(times, key=lambda name: times[name])
    assert result.figures["pytorch"]["ratio"] == pytest.approx(times["pytorch"] / times["torch_gdn"])
