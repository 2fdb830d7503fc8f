from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry.aura import HEAD_SIZES, Codec
from torch_gdn_check.registry.models import DTYPES


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("D", HEAD_SIZES)
def test_equals_the_matrix(device: torch.device, D: int, inverse: bool) -> None:
    signs, x = Codec(D, 4).signs, torch.randn(2, 3, 5, D).to(DTYPES[D // 16 % 3])
    y = launched(device, "aura_rotate", torch_gdn.aura_rotate, x.to(device), signs.to(device), 0.7, inverse).cpu()
    assert y.dtype == torch.float32 and y.is_contiguous()
    assert_close("y", y, reference.aura_rotate(x.double(), signs, 0.7, inverse), 4e-7, head_dim=None)
