"""Tests AURA's ops with inputs of unusual strides."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.aura.test_aura_attention import CASES, attend, make_call
from tests.helpers.errors import assert_same_bits
from torch_gdn.testing.inputs import to_device


@pytest.mark.parametrize("L", [1, 8])
@pytest.mark.parametrize("which", ["key", "value"])
def test_norms_with_strides_of_their_own(device: torch.device, L: int, which: str) -> None:
    call = make_call(CASES[0] | {"D": 64, "L": L, "T": 63, "ratio": 2})
    o = attend(device, call)
    norms = call[f"{which}_norms"]
    wide = norms.new_full((*norms.shape[:-1], 2 * norms.shape[-1]), torch.nan)
    wide[..., ::2] = norms
    strided = to_device(call, device) | {f"{which}_norms": wide.to(device)[..., ::2]}
    assert_same_bits("o", torch_gdn.aura_attention(**strided), o)
