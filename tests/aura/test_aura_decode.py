from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.aura import CODECS
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry.aura import Codec
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import DTYPES

BOUND = {torch.float32: 3e-7, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}


def decode(device: torch.device, codec: Codec, codes: Tensor, norms: Tensor, **options: Any) -> Tensor:
    on_device = (x.to(device) for x in (codes, norms, codec.codebook, codec.signs))
    return launched(device, "aura_decode", torch_gdn.aura_decode, *on_device, **to_device(options, device)).cpu()


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("D", "bits"), CODECS)
def test_equals_the_reference(device: torch.device, D: int, bits: int) -> None:
    codec, dtype, rotated = Codec(D, bits), DTYPES[(D // 16 + bits) % 3], bits in (2, 8)
    codes, norms = reference.aura_encode(torch.randn(1, 2, 131, D), *codec.tables)
    call: dict[str, Any] = {"rotated": rotated, "dtype": dtype}
    if D % 3 == 2:
        call["tile_means"] = torch.randn(1, 2, 3, D).half()
    x = decode(device, codec, codes, norms.half(), **call)
    assert x.dtype == dtype and x.is_contiguous()
    call |= {"dtype": torch.float64}
    exact = reference.aura_decode(codes, norms.half(), codec.codebook, codec.signs, **call)
    assert_close("x", x, exact, BOUND[dtype], head_dim=None)


def test_part_of_a_cache(device: torch.device) -> None:
    codec = Codec(80, 3)
    codes, norms = reference.aura_encode(torch.randn(2, 9, 3, 80), *codec.tables)
    norms = norms.half()
    part = [x.to(device).transpose(1, 2)[:, :, 2:7] for x in (codes, norms)]
    on_device = codec.to(device)
    x = torch_gdn.aura_decode(*part, on_device.codebook, on_device.signs)
    exact = reference.aura_decode(codes, norms, codec.codebook, codec.signs, dtype=torch.float64)
    assert_close("x", x.cpu(), exact.transpose(1, 2)[:, :, 2:7], BOUND[torch.float32], head_dim=None)


def test_a_norm_that_is_not_finite_stays_in_its_vector(device: torch.device) -> None:
    codec = Codec(96, 4)
    codes, norms = reference.aura_encode(torch.randn(8, 96), *codec.tables)
    norms = norms.half()
    x = decode(device, codec, codes, norms)
    norms[3] = torch.nan
    spoilt = decode(device, codec, codes, norms)
    others = torch.arange(8) != 3
    assert spoilt[3].isnan().all() and torch.equal(spoilt[others], x[others])
