from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry.aura import HEAD_SIZES, Codec
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import DTYPES

BOUND = {torch.float32: 5e-7, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}


def make_call(D: int, NB: int, with_sinks: bool) -> dict[str, Any]:
    rows = (2, 3, 4, NB)
    call = {"o_partials": torch.randn(*rows, D), "m_partials": 3 * torch.randn(rows), "l_partials": torch.rand(rows)}
    unseen = torch.rand(rows) < 0.3
    call["o_partials"][unseen], call["l_partials"][unseen] = 0, 0
    call["m_partials"][unseen] = -torch.inf
    call["value_signs"] = Codec(D, 4).signs
    return call | ({"sinks": torch.randn(3)} if with_sinks else {})


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("D", HEAD_SIZES)
def test_equals_the_reference(device: torch.device, D: int, with_sinks: bool) -> None:
    call, dtype = make_call(D, 1 + D % 37, with_sinks), DTYPES[D // 16 % 3]
    o = launched(device, "aura_flash_p2", torch_gdn.aura_flash_p2, **to_device(call, device), dtype=dtype).cpu()
    assert o.dtype == dtype and o.is_contiguous()
    doubled = {name: x.double() if name != "value_signs" else x for name, x in call.items()}
    assert_close("o", o, reference.aura_flash_p2(**doubled, dtype=torch.float64), BOUND[dtype], head_dim=1)


def test_rows_that_saw_nothing_are_zeros(device: torch.device) -> None:
    call = make_call(80, 3, True)
    for name, value in (("o_partials", 0), ("l_partials", 0), ("m_partials", -torch.inf)):
        call[name][1, 2] = value
    o = torch_gdn.aura_flash_p2(**to_device(call, device)).cpu()
    assert (o[1, 2] == 0).all() and (o[1, 1] != 0).any()
